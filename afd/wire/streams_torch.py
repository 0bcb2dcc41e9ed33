"""What both workers need from a device: slots as tensors, and the streams of a step."""

import pkgutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from afd.devices import device_named, device_of_torch


class Payloads(Protocol):
    """The part of ``afd_comm.Region`` that this module uses."""

    @property
    def slot_bytes(self) -> int: ...

    def view(self, slot: int) -> object:
        """Return the slot's payload as uint8 [1, slot stride], for DLPack."""


def torch_device(name: str) -> torch.device:
    """Return this process's device of the kind ``name`` (:data:`afd.devices.DEVICES`)."""
    return torch.device(device_named(name).torch_device)


def slot_bytes(region: Payloads, slot: int) -> torch.Tensor:
    """Return the slot's payload as uint8 [slot_bytes], on host or device; no copy."""
    return torch.from_dlpack(region.view(slot))[0, : region.slot_bytes]


def synchronize(device: torch.device) -> None:
    """Wait until all queued work of the current stream is done, so that the host can post it."""
    if device_of_torch(device.type).has_streams:
        torch.cuda.current_stream(device).synchronize()


class Streams(Protocol):
    """A compute stream and a copy stream, by the addresses that the transport takes."""

    @property
    def compute(self) -> int:
        """Address of the stream that runs kernels."""

    @property
    def copy(self) -> int: ...

    def fork(self) -> None:
        """Order later work of ``copy`` after all work queued on ``compute`` so far."""

    def join(self) -> None:
        """Order later work of ``compute`` after all work queued on ``copy`` so far."""

    def copying(self) -> AbstractContextManager[object]:
        """Inside the context kernels run on ``copy``: work for a message delays nothing else."""

    def begin_step(self) -> None:
        """Order the work of all :meth:`apart` contexts after the work of ``compute`` so far."""

    def apart(self, micro_batch: int) -> AbstractContextManager[object]:
        """Inside the context ``compute`` is a stream of this micro-batch alone.

        Its waits delay no other micro-batch, and its kernels use the multiprocessors that the
        others leave idle. The first context of a step starts after :meth:`begin_step`. A later one
        starts after the work that ``copy`` had when this micro-batch's last context ended; that
        must include everything that the awaited messages depend on. Call :meth:`fork` before the
        context ends.

        Only FFN instances may use this. Streams can share a hardware queue, where kernels of one
        micro-batch queue behind the wait of another. If only one side does so, a step always ends,
        because everything a message depends on was sent before its wait is queued. If both sides
        did, each could block what the other waits for.
        """

    def capturable(self) -> AbstractContextManager[object]:
        """Inside the context ``compute`` can be captured, unlike the default stream."""

    def stamp(self, *, copying: bool = False) -> object:
        """Record when ``compute`` (or ``copy``) reaches this point; in a graph: at each replay."""

    def elapsed_ns(self, first: object, then: object) -> int:
        """Return the time between two stamps of one device, ns; both must have been reached."""


class HostStreams:
    """Device cpu: every operation is complete when its call returns, so nothing needs ordering."""

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


def host_streams(_device: torch.device, _depth: int) -> HostStreams:
    """Factory for the table of devices, which passes the same arguments to every kind."""
    return HostStreams()


class CudaStreams:
    """The current stream as ``compute``, and a copy stream. May be captured: the ordering becomes
    edges of the graph."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        # High priority: its small kernels run before large ones of the compute stream.
        self._copy = torch.cuda.Stream(device, priority=-1)
        # Made now: while a stream waits, CUDA may be unable to make one (comm/README.md).
        self._own = [torch.cuda.Stream(device) for _ in range(depth)]
        self._captured = torch.cuda.Stream(device)
        # Per micro-batch: the event that its next `apart` context in this step waits for.
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
        # external: a graph node that records at each replay, instead of an edge
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(self._copy if copying else torch.cuda.current_stream(self._device))
        return event

    def elapsed_ns(self, first: object, then: object) -> int:
        assert isinstance(first, torch.cuda.Event) and isinstance(then, torch.cuda.Event)
        return int(first.elapsed_time(then) * 1e6)


def make_streams(device: torch.device, depth: int = 0) -> Streams:
    """Return the streams of a device; depth: number of micro-batches for :meth:`Streams.apart`."""
    kind = device_of_torch(device.type)
    streams: Streams = pkgutil.resolve_name(kind.streams)(device, depth)
    return streams
