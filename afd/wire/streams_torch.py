"""What both workers need of a device: slots as tensors, and the streams that a step runs on."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

    def begin_step(self) -> None:
        """What micro-batches get ``apart`` starts after all that ``compute`` was given so far."""

    def apart(self, micro_batch: int) -> AbstractContextManager[object]:
        """Within, ``compute`` is a stream of this micro-batch alone: what it waits for holds up no
        other one, and its kernels fill the multiprocessors that theirs leave idle.

        It starts behind what ``copy`` was given when this micro-batch was here last, which must be
        all that the messages it waits for depend on; in its first turn behind :meth:`begin_step`.
        Before it ends ``copy`` has to follow it (:meth:`fork`).

        For one side of the wire only: the FFN instances'. Streams may share a queue of the device,
        where a micro-batch's kernels stand behind another's wait. With this side alone a step
        ends even if all streams share one, as what a message depends on went out before its wait is
        given; if attention did so too, each side could hold up what the other waits for.
        """

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

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin_step(self) -> None: ...

    def apart(self, micro_batch: int) -> AbstractContextManager[object]:
        return nullcontext()

    def capturable(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stamp(self, *, copying: bool = False) -> object:
        return time.monotonic_ns()

    def elapsed_ns(self, first: object, then: object) -> int:
        assert isinstance(first, int) and isinstance(then, int)
        return then - first


class CudaStreams:
    """The current stream, and our own beside it. May be captured: what orders them are edges of the
    graph."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        # Its small kernels go before the large ones that computing has begun meanwhile.
        self._copy = torch.cuda.Stream(device, priority=-1)
        # Made now: with a wait pending on some other stream they could not be (comm/README.md).
        self._own = [torch.cuda.Stream(device) for _ in range(depth)]
        self._captured = torch.cuda.Stream(device)
        # By micro-batch, what its next turn in this step is behind.
        self._before: list[torch.cuda.Event] = []

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

    def begin_step(self) -> None:
        begun = torch.cuda.current_stream(self._device).record_event()
        self._before = [begun] * len(self._own)

    @contextmanager
    def apart(self, micro_batch: int) -> Iterator[None]:
        own = self._own[micro_batch]
        own.wait_event(self._before[micro_batch])
        with torch.cuda.stream(own):
            yield
        self._before[micro_batch] = self._copy.record_event()

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


def make_streams(device: torch.device, depth: int = 0) -> Streams:
    """depth: micro-batches that may be :meth:`Streams.apart`."""
    return HostStreams() if device.type == "cpu" else CudaStreams(device, depth)
