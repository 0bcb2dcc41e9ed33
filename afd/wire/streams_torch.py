"""What both workers need of a device: slots as tensors, and the streams that a step runs on."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Payloads(Protocol):
    """What is asked of an ``afd_comm.Region`` here."""

    @property
    def slot_bytes(self) -> int: ...

    def view(self, slot: int) -> object:
        """By DLPack uint8 [1, slot stride]."""


def torch_device(name: str) -> torch.device:
    """Device of a worker: "cpu", or the first visible GPU (torch calls AMD's cuda as well)."""
    return torch.device("cpu") if name == "cpu" else torch.device(name, 0)


def slot_bytes(region: Payloads, slot: int) -> torch.Tensor:
    """The slot's payload as uint8 [slot_bytes] where it is, host or device; no copy."""
    return torch.from_dlpack(region.view(slot))[0, : region.slot_bytes]


def settle(device: torch.device) -> None:
    """Return when everything that the current stream was given is done; for what the host posts."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


class Streams(Protocol):
    """A stream that computes and one that copies behind it, as the transport takes them."""

    @property
    def compute(self) -> int:
        """Address of the stream that kernels go to."""

    @property
    def copy(self) -> int: ...

    def fork(self) -> None:
        """What ``copy`` gets from now on starts after all that ``compute`` was given so far."""

    def join(self) -> None:
        """What ``compute`` gets from now on starts after all that ``copy`` was given so far."""

    def copying(self) -> AbstractContextManager[object]:
        """Within, kernels go to ``copy``: what only a message needs does not hold up the rest."""

    def expect(self, micro_batch: int, wait: Callable[[int], object]) -> None:
        """Have ``wait``, which gives a wait for messages to the stream of this address, called for
        a stream of its own. It begins behind what ``copy`` was given so far, which must be all of
        ours that those messages depend on, and is over once ``compute`` comes to it.

        For one side of the wire only: the FFN instances'. Streams may share a queue of the device,
        where ``compute`` stands behind waits that it does not need. With this side alone a step
        ends even if all streams share one, as what a message depends on goes out before its wait is
        given; if attention waited ahead too, each side could hold up what the other waits for.
        """

    def arrive(self, micro_batch: int) -> None:
        """What ``compute`` gets from now on starts after what was expected in this micro-batch."""

    def capturable(self) -> AbstractContextManager[object]:
        """Within, ``compute`` is a stream that can be captured, which the default stream cannot."""

    def stamp(self, *, copying: bool = False) -> object:
        """The moment at which ``compute`` (or ``copy``) gets here; in a graph: at each replay."""

    def elapsed_ns(self, first: object, then: object) -> int:
        """From one stamp to another of the same device, both of them past."""


class HostStreams:
    """Device cpu: an operation is done when its call returns, so there is nothing to order, and
    nothing is waited for before it is needed."""

    compute = 0
    copy = 0

    def __init__(self) -> None:
        self._expected: dict[int, Callable[[int], object]] = {}

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def expect(self, micro_batch: int, wait: Callable[[int], object]) -> None:
        self._expected[micro_batch] = wait

    def arrive(self, micro_batch: int) -> None:
        self._expected.pop(micro_batch)(self.compute)

    def capturable(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stamp(self, *, copying: bool = False) -> object:
        return time.monotonic_ns()

    def elapsed_ns(self, first: object, then: object) -> int:
        assert isinstance(first, int) and isinstance(then, int)
        return then - first


class CudaStreams:
    """The current stream, and two of our own beside it. May be captured: what orders them are edges
    of the graph. Between a kernel and the next one a wait costs 8 us even if its message is there
    (docs/results/notes.md): hence the stream that only waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Its small kernels go before the large ones that computing has begun meanwhile.
        self._copy = torch.cuda.Stream(device, priority=-1)
        self._receive = torch.cuda.Stream(device)
        self._expected: dict[int, torch.cuda.Event] = {}
        # Made now: with a wait pending on some other stream it could not be (comm/README.md).
        self._captured = torch.cuda.Stream(device)

    @property
    def compute(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    @property
    def copy(self) -> int:
        return self._copy.cuda_stream

    def fork(self) -> None:
        self._copy.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._copy)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copy)

    def expect(self, micro_batch: int, wait: Callable[[int], object]) -> None:
        self._receive.wait_stream(self._copy)
        wait(self._receive.cuda_stream)
        self._expected[micro_batch] = self._receive.record_event()

    def arrive(self, micro_batch: int) -> None:
        arrived = self._expected.pop(micro_batch)
        torch.cuda.current_stream(self._device).wait_event(arrived)

    def capturable(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._captured)

    def stamp(self, *, copying: bool = False) -> object:
        # external: a node of the graph that records anew at each replay, not an edge of it
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(self._copy if copying else torch.cuda.current_stream(self._device))
        return event

    def elapsed_ns(self, first: object, then: object) -> int:
        assert isinstance(first, torch.cuda.Event) and isinstance(then, torch.cuda.Event)
        return int(first.elapsed_time(then) * 1e6)


def make_streams(device: torch.device) -> Streams:
    return HostStreams() if device.type == "cpu" else CudaStreams(device)
