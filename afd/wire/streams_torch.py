"""What both workers need from a device: slots as tensors, streams, and graphs of a step.

This is the only module that touches torch's device API for work of a step. A device names its
:class:`Runtime` in the table of devices (:mod:`afd.devices`).
"""

import pkgutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Protocol, TypeVar

import torch

from afd.devices import Device, device_named, device_of_region, device_of_torch

_Recorded = TypeVar("_Recorded")


class Payloads(Protocol):
    """The part of ``afd_comm.Region`` that this module uses."""

    @property
    def device(self) -> str: ...

    @property
    def slot_bytes(self) -> int: ...

    def enqueue_wait(self, stream: int, slots: list[int], flags: list[int]) -> None: ...

    def view(self, slot: int) -> object:
        """Return the slot's payload as uint8 [1, slot stride], for DLPack."""


class StepTimer(Protocol):
    """Measures the time between two points of a device, on the host's queue and in no graph."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def seconds(self) -> float:
        """The time between the last two points, once both have been reached."""


def torch_device(name: str) -> torch.device:
    """Return this process's device of the kind ``name`` (:data:`afd.devices.DEVICES`)."""
    return torch.device(device_named(name).torch_device)


def runtime_of(device: torch.device) -> "Runtime":
    """Return the runtime of the kind of device that ``device`` is."""
    return _runtime(device_of_torch(device.type))


@cache  # the host form asks twice per message
def _runtime(kind: Device) -> "Runtime":
    runtime: Runtime = pkgutil.resolve_name(kind.runtime)()
    return runtime


def slot_bytes(region: Payloads, slot: int) -> torch.Tensor:
    """Return the slot's payload as uint8 [slot_bytes], on host or device; no copy."""
    return _runtime(device_of_region(region.device)).payload(region, slot)[: region.slot_bytes]


def synchronize(device: torch.device) -> None:
    """Wait until all queued work of the current stream is done, so that the host can post it."""
    runtime_of(device).synchronize(device)


class Streams(Protocol):
    """A compute stream and a copy stream, by the addresses that the transport takes.

    In a step of depth 1 they are one stream: the next work waits for the answer anyway, and each
    wait of one stream for another takes time (docs/results/wire_gpu.md).
    """

    @property
    def compute(self) -> int:
        """Address of the stream that runs kernels."""

    @property
    def copy(self) -> int: ...

    def wait_for(self, region: Payloads, slots: list[int], flags: list[int]) -> None:
        """Order later work of ``compute`` after the messages with these doorbells."""

    def fork(self) -> None:
        """Order later work of ``copy`` after all work queued on ``compute`` so far."""

    def join(self) -> None:
        """Order later work of ``compute`` after all work queued on ``copy`` so far."""

    def copying(self) -> AbstractContextManager[object]:
        """Inside the context kernels run on ``copy``: work for a message delays nothing else."""

    def begin_step(self, depth: int) -> None:
        """Begin a step of ``depth`` micro-batches. The work of all :meth:`apart` contexts comes
        after the work of ``compute`` so far."""

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
        did, each could block what the other waits for. An FFN instance's answers are sent from
        another stream, by its gate (docs/gpu-design.md).
        """

    def capturable(self) -> AbstractContextManager[object]:
        """Inside the context ``compute`` can be captured, unlike the default stream."""

    def stamp(self, *, copying: bool = False) -> object:
        """Record when ``compute`` (or ``copy``) reaches this point; in a graph: at each replay.

        torch for ROCm cannot record it in a graph: see ``Device.stamps_in_graphs``."""

    def elapsed_ns(self, first: object, then: object) -> int:
        """Return the time between two stamps of one device, ns; both must have been reached."""


class HostStreams:
    """Device cpu: every operation is complete when its call returns, so nothing needs ordering."""

    compute = 0
    copy = 0

    def wait_for(self, region: Payloads, slots: list[int], flags: list[int]) -> None:
        region.enqueue_wait(self.compute, slots, flags)

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin_step(self, depth: int) -> None: ...

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
    """The current stream as ``compute``, and a copy stream. May be captured: the ordering becomes
    edges of the graph."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        # High priority: its small kernels run before large ones of the compute stream.
        self._copy = torch.cuda.Stream(device, priority=-1)
        self._one = False  # whether ``copy`` is ``compute``
        # Made now: while a stream waits, CUDA may be unable to make one (comm/README.md).
        self._own = [torch.cuda.Stream(device) for _ in range(depth)]
        self._captured = torch.cuda.Stream(device)
        # Per micro-batch: the event that its next `apart` context in this step waits for.
        self._before: list[torch.cuda.Event] = []

    @property
    def compute(self) -> int:
        return self._current().cuda_stream

    @property
    def copy(self) -> int:
        return self._copying().cuda_stream

    def wait_for(self, region: Payloads, slots: list[int], flags: list[int]) -> None:
        region.enqueue_wait(self.compute, slots, flags)

    def fork(self) -> None:
        if not self._one:
            self._copy.wait_stream(self._current())

    def join(self) -> None:
        if not self._one:
            self._current().wait_stream(self._copy)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copying())

    def begin_step(self, depth: int) -> None:
        self._one = depth == 1
        begun = self._current().record_event()
        self._before = [begun] * len(self._own)

    @contextmanager
    def apart(self, micro_batch: int) -> Iterator[None]:
        if self._one:
            yield
            return
        own = self._own[micro_batch]
        own.wait_event(self._before[micro_batch])
        with torch.cuda.stream(own):
            yield
        self._before[micro_batch] = self._copy.record_event()

    def capturable(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._captured)

    def stamp(self, *, copying: bool = False) -> object:
        # external: a graph node that records at each replay, instead of an edge. Outside of a graph
        # it changes nothing, and torch for ROCm refuses it.
        external = torch.version.hip is None
        event = torch.cuda.Event(enable_timing=True, external=external)
        event.record(self._copying() if copying else self._current())
        return event

    def elapsed_ns(self, first: object, then: object) -> int:
        assert isinstance(first, torch.cuda.Event) and isinstance(then, torch.cuda.Event)
        return int(first.elapsed_time(then) * 1e6)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _copying(self) -> torch.cuda.Stream:
        return self._current() if self._one else self._copy


class Runtime(Protocol):
    """The device's API, as far as a step uses it. Stateless: one serves all uses."""

    def enter(self, device: torch.device) -> None:
        """Make ``device`` the process's own and a stream that can be captured the current one."""

    def streams(self, device: torch.device, depth: int) -> Streams:
        """See :func:`make_streams`."""

    def synchronize(self, device: torch.device) -> None:
        """See :func:`synchronize`."""

    def payload(self, region: Payloads, slot: int) -> torch.Tensor:
        """Return the slot as uint8 [slot stride]; no copy."""

    def graph_memory(self) -> object:
        """Return memory that graphs of which one runs at a time can share; None: unknown here."""

    def capture(
        self, device: torch.device, record: Callable[[], _Recorded], memory: object = None
    ) -> tuple[_Recorded, Callable[[], None]]:
        """Capture what ``record`` queues on the current stream as a graph.

        Args:
            memory: from :meth:`graph_memory`, for the graph's tensors; None: memory of its own.

        Returns:
            What ``record`` returned, and the function that replays the graph on the current stream.
        """

    def step_timer(self) -> StepTimer: ...

    def aside(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        """Return a function that returns a context for work beside the steps, in any thread.

        In it, the calling thread uses a stream that no step uses. On the stream of a step, a copy
        would wait for the step's messages, and other copies behind it, those of messages among
        them.
        """


class HostTimer:
    """The host's clock."""

    def __init__(self) -> None:
        self._began = self._ended = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._ended = time.monotonic()

    def seconds(self) -> float:
        return self._ended - self._began


class HostRuntime:
    """Device cpu."""

    def enter(self, device: torch.device) -> None: ...

    def streams(self, device: torch.device, depth: int) -> Streams:
        return HostStreams()

    def synchronize(self, device: torch.device) -> None: ...

    def payload(self, region: Payloads, slot: int) -> torch.Tensor:
        return torch.from_dlpack(region.view(slot))[0]

    def graph_memory(self) -> object:
        return None

    def capture(
        self, device: torch.device, record: Callable[[], _Recorded], memory: object = None
    ) -> tuple[_Recorded, Callable[[], None]]:
        raise NotImplementedError("device cpu captures no graphs: afd.devices.CPU says so")

    def step_timer(self) -> StepTimer:
        return HostTimer()

    def aside(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext


class CudaTimer:
    """Events of the current stream."""

    def __init__(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        self._began.record()

    def end(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1e3


class CudaRuntime:
    """CUDA, and ROCm: its builds of torch have the same API."""

    def enter(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # the default one cannot be captured

    def streams(self, device: torch.device, depth: int) -> Streams:
        return CudaStreams(device, depth)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()

    def payload(self, region: Payloads, slot: int) -> torch.Tensor:
        return torch.from_dlpack(region.view(slot))[0]

    def graph_memory(self) -> object:
        return torch.cuda.graph_pool_handle()

    def capture(
        self, device: torch.device, record: Callable[[], _Recorded], memory: object = None
    ) -> tuple[_Recorded, Callable[[], None]]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        # thread_local: the metrics thread may copy the experts' load from the device meanwhile.
        with torch.cuda.graph(
            graph,
            pool=memory,  # type: ignore[arg-type]  # torch's own handle, from graph_memory()
            stream=stream,
            capture_error_mode="thread_local",
        ):
            recorded = record()
        return recorded, graph.replay

    def step_timer(self) -> StepTimer:
        return CudaTimer()

    def aside(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        stream = torch.cuda.Stream(device)  # once: torch has 32, and gives them out in turn
        return lambda: torch.cuda.stream(stream)


def make_streams(device: torch.device, depth: int = 0) -> Streams:
    """Return the streams of a device; depth: number of micro-batches for :meth:`Streams.apart`."""
    return runtime_of(device).streams(device, depth)
