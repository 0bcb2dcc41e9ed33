"""torch's device API for the stand-in node: streams and graphs of hip.cc, tensors in host memory.

An operation of torch runs on the host when it is called. While a stream is captured, it becomes a
host function of the graph too, which runs it again on the same tensors. So a replay computes with
what its own step has received.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from afd.wire.streams_torch import HostTimer, Payloads, StepTimer, Streams
from ffn_worker.allreduce.base import Collective, Setup
from ffn_worker.allreduce.gloo import GlooCollective
from ffn_worker.moe.reference import ReferenceBackend

_Recorded = TypeVar("_Recorded")
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
THREAD_LOCAL = 1
NON_BLOCKING = 1


class HipError(RuntimeError):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with error {code}")
        self.code = code


class Hip:
    """The stand-in's API: ``hip.hipStreamQuery(...)`` raises HipError unless it succeeds."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libamdhip64.so")

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name)

        def call(*args: object) -> None:
            if code := function(*args):
                raise HipError(name, code)

        return call

    def stream(self) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        self.hipStreamCreateWithFlags(ctypes.byref(out), NON_BLOCKING)
        return out

    def event(self) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        self.hipEventCreateWithFlags(ctypes.byref(out), 0)
        return out


@cache
def hip() -> Hip:
    return Hip()


class _Current(threading.local):
    """The current streams of a thread, innermost last."""

    def __init__(self) -> None:
        self.streams = [hip().stream()]


@cache
def _current() -> _Current:
    return _Current()


def current() -> ctypes.c_void_p:
    return _current().streams[-1]


@contextmanager
def on(stream: ctypes.c_void_p) -> Iterator[None]:
    streams = _current().streams
    streams.append(stream)
    try:
        yield
    finally:
        streams.pop()


class StandInStreams:
    """See :class:`afd.wire.streams_torch.Streams`; the edges are those of ``CudaStreams``."""

    def __init__(self, depth: int) -> None:
        self._copy = hip().stream()
        self._one = False
        self._own = [hip().stream() for _ in range(depth)]
        self._captured = hip().stream()
        self._before: list[ctypes.c_void_p] = []

    @property
    def compute(self) -> int:
        return current().value or 0

    @property
    def copy(self) -> int:
        return self._copying().value or 0

    def _copying(self) -> ctypes.c_void_p:
        return current() if self._one else self._copy

    def _order(self, first: ctypes.c_void_p, then: ctypes.c_void_p) -> None:
        event = hip().event()
        hip().hipEventRecord(event, first)
        hip().hipStreamWaitEvent(then, event, 0)

    def wait_for(self, region: Payloads, slots: list[int], flags: list[int]) -> None:
        region.enqueue_wait(self.compute, slots, flags)
        hip().hipStreamSynchronize(current())  # torch computes on the host at once

    def fork(self) -> None:
        if not self._one:
            self._order(current(), self._copy)

    def join(self) -> None:
        if not self._one:
            self._order(self._copy, current())

    def copying(self) -> Any:
        return on(self._copying())

    def begin_step(self, depth: int) -> None:
        self._one = depth == 1
        event = hip().event()
        hip().hipEventRecord(event, current())
        self._before = [event] * len(self._own)

    @contextmanager
    def apart(self, micro_batch: int) -> Iterator[None]:
        if self._one:
            yield
            return
        own = self._own[micro_batch]
        hip().hipStreamWaitEvent(own, self._before[micro_batch], 0)
        with on(own):
            yield
        self._before[micro_batch] = hip().event()
        hip().hipEventRecord(self._before[micro_batch], self._copy)

    def capturable(self) -> Any:
        return on(self._captured)

    def stamp(self, *, copying: bool = False) -> object:
        raise AssertionError("ROCm takes no stamps in graphs: Device.stamps_in_graphs")

    def elapsed_ns(self, first: object, then: object) -> int:
        raise AssertionError("ROCm takes no stamps in graphs: Device.stamps_in_graphs")


_EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty}
"""Operations whose results have no content yet."""


class Recorder(TorchDispatchMode):
    """Adds every operation of torch to the graph that is captured, as a host function."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []  # what the graph refers to
        self.paused = False

    def as_one(self, work: Callable[[], None]) -> None:
        """Adds ``work`` as one host function, and runs it."""
        self.paused = True
        work()
        self.paused = False

        def again(_data: int) -> None:
            with torch.inference_mode():
                work()

        function = _HostFunction(again)
        self.kept += [function, work]
        hip().hipLaunchHostFunc(current(), function, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        bind = rebound.get(func)
        run = bind(*args, **kwargs) if bind else partial(func, *args, **kwargs)
        out = run()
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        results = _tensors(out)
        fresh = [t.untyped_storage().data_ptr() not in given for t in results]
        is_view = results and not any(fresh) and not func._schema.is_mutable
        if is_view or func.overloadpacket in _EMPTY:
            return out  # nothing to compute

        def again(_data: int) -> None:
            with torch.inference_mode():
                now = run()
                if any(fresh):
                    for old, new, is_fresh in zip(results, _tensors(now), fresh, strict=True):
                        if is_fresh:
                            old.copy_(new)

        function = _HostFunction(again)
        self.kept += [function, args, kwargs, out]
        hip().hipLaunchHostFunc(current(), function, None)
        return out


_recorders: list[Recorder] = []  # the running one, if any

rebound: dict[object, Callable[..., Callable[[], Any]]] = {}
"""Operations that read more than their arguments -> function of the arguments that returns what a
replay runs."""


def capturable(function: Callable[..., None]) -> Callable[..., None]:
    """The function, whose own operations depend on the data of a step, as one operation."""

    def call(*args: object, **kwargs: object) -> None:
        if _recorders:
            _recorders[-1].as_one(lambda: function(*args, **kwargs))
        else:
            function(*args, **kwargs)

    return call


def _tensors(tree: object) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class Replay:
    """A captured graph."""

    def __init__(self, graph: ctypes.c_void_p, kept: list[object]) -> None:
        self._executable, self._kept = ctypes.c_void_p(), kept
        hip().hipGraphInstantiate(ctypes.byref(self._executable), graph, None, None, 0)

    def __call__(self) -> None:
        hip().hipGraphLaunch(self._executable, current())


class TorchGraph:
    """In place of torch.cuda.CUDAGraph."""

    replay: Replay


@contextmanager
def captured(graph: TorchGraph, **_further: object) -> Iterator[None]:
    """In place of torch.cuda.graph; captures the current stream."""
    stream, made = current(), ctypes.c_void_p()
    hip().hipStreamBeginCapture(stream, THREAD_LOCAL)
    with Recorder() as recorder:
        _recorders.append(recorder)
        try:
            yield
        finally:
            _recorders.pop()
    hip().hipStreamEndCapture(stream, ctypes.byref(made))
    graph.replay = Replay(made, recorder.kept)


class StandInRuntime:
    """See :class:`afd.wire.streams_torch.Runtime`."""

    def enter(self, device: torch.device) -> None:
        current()
        # On a GPU this is one kernel. Its plain form looks at the rows of the step.
        if slots := sys.modules.get("ffn_worker.slots"):
            slots.__dict__["take_bucket"] = capturable(slots.__dict__["take_bucket"])

    def streams(self, device: torch.device, depth: int) -> Streams:
        return StandInStreams(depth)

    def synchronize(self, device: torch.device) -> None:
        hip().hipStreamSynchronize(current())

    def payload(self, region: Payloads, slot: int) -> torch.Tensor:
        """torch for CPUs takes no DLPack tensor of a ROCm device, so its pointer is read."""
        view: Any = region.view(slot)
        assert view.__dlpack_device__()[0] == 10, "kDLROCM: the slot is memory of hip:N"
        content = ctypes.pythonapi.PyCapsule_GetPointer
        content.restype, content.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        capsule = view.__dlpack__()
        address = ctypes.cast(content(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_void_p))[0]
        stride = int(region.slot_stride)  # type: ignore[attr-defined]
        raw = (ctypes.c_uint8 * stride).from_address(address)
        return torch.frombuffer(raw, dtype=torch.uint8)

    def graph_memory(self) -> object:
        return None

    def capture(
        self, device: torch.device, record: Callable[[], _Recorded], memory: object = None
    ) -> tuple[_Recorded, Callable[[], None]]:
        graph = TorchGraph()
        with captured(graph):
            recorded = record()
        return recorded, graph.replay

    def step_timer(self) -> StepTimer:
        return HostTimer()

    def aside(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext  # every thread has a stream of its own


_backends: list["CapturedReference"] = []


@torch.library.custom_op("stand_in::experts", mutates_args=())
def _experts(
    number: int, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return ReferenceBackend.forward(_backends[number], layer, x, ids, weights)


class CapturedReference(ReferenceBackend):
    """The reference as one operation, because its own depend on the routing of a step."""

    capturable = True

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._number = len(_backends)
        _backends.append(self)

    def forward(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = _experts(self._number, layer, x, topk_ids, topk_weights)
        return out


_sums: list["CapturedSum"] = []


@torch.library.custom_op("stand_in::sum", mutates_args=())
def _sum(number: int, x: torch.Tensor) -> torch.Tensor:
    return GlooCollective.reduce_scatter(_sums[number], x)


class CapturedSum(GlooCollective):
    """The sum over the ranks of an FFN instance as one operation, through the host."""

    capturable = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._number = len(_sums)
        _sums.append(self)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _sum(self._number, x)
        return out


def make_sum(setup: Setup, table: object = None) -> Collective:
    """See :class:`ffn_worker.allreduce.registry.Make`."""
    return CapturedSum(setup)
