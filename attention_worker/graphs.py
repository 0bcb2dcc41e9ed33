"""Decode steps of an attention instance as captured graphs, transport included.

vLLM captures and replays the model as a whole where a step is uniform decode
(vllm/compilation/cuda_graph.py: CUDAGraphWrapper, mode FULL). What is added here: the depth is part
of the key, the FFN instances are told of a step before it is replayed, and a step whose peer dies
is run again when the peer is back.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, ForwardContext, get_forward_context

from afd.errors import DeadlineExceeded, PeerLost
from afd.metrics import RoleMetrics
from afd.step_trace import Marks, new_marks
from afd.wire.streams_torch import Streams
from afd_comm import Region, Status
from attention_worker.ffn_sessions import Ffn
from attention_worker.remote import RemoteExperts
from attention_worker.stream import StreamExperts, Waits, failed_peers

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class _Step:
    """A captured step. context: the graph reads its metadata tensors, so it is kept alive. marks:
    of its last replay."""

    waits: Waits
    marks: Marks
    context: ForwardContext


class Running:
    """A replayed step that the host went on from. A thread watches it, so that its streams are
    freed at the deadline whatever the engine waits for meanwhile."""

    def __init__(
        self, statuses: Future[list[Status]], judge: Callable[[Sequence[Status]], None]
    ) -> None:
        self._statuses = statuses
        self._judge = judge
        # vLLM asks for a step's tokens in a thread of its own while the engine begins the next one.
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Wait until it is through; what it computed may be used then, and only then.

        Raises:
            DeadlineExceeded, PeerLost: it failed. Its inputs are overwritten by now, so it cannot
                be run again, and the engine has to end.
        """
        statuses = self._statuses.result()
        with self._lock:
            self._judge(statuses)
            self._judge = _accept


def _accept(statuses: Sequence[Status]) -> None:
    """Of a step that has been judged."""


class StepGraphs(CUDAGraphWrapper):
    """The model as vLLM calls it: graphs for uniform decode, else as it is.

    running: the last replayed step, where the host goes on from it (``pipeline.lookahead``).
    """

    def __init__(
        self,
        model: "nn.Module",
        vllm_config: VllmConfig,
        host: RemoteExperts,
        stream: StreamExperts,
        region: Region,
        streams: Streams,
        metrics: RoleMetrics,
        deadline_s: float,
        stage_every: int,
        lookahead: bool,
    ) -> None:
        super().__init__(model, vllm_config, runtime_mode=CUDAGraphMode.FULL)
        self._host = host
        self._stream = stream
        self._region = region
        self._streams = streams
        self._deadline_s = deadline_s
        self._stage_every = stage_every
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="guard") if lookahead else None
        self.running: Running | None = None
        self._replays = 0
        self._metrics = metrics
        self._began = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)
        self._peers: tuple[Ffn, ...] = ()
        self._entries: dict[int, dict[BatchDescriptor, CUDAGraphEntry]] = {}
        self._steps: dict[tuple[int, BatchDescriptor], _Step] = {}

    def clear_graphs(self) -> None:
        """Forget every graph; the next step of each shape is captured anew."""
        super().clear_graphs()
        self._entries.clear()
        self._steps.clear()
        # PyTorch's allocator refuses to capture into a pool whose graphs are all gone.
        self.graph_pool = torch.cuda.graph_pool_handle()

    def __call__(self, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Final hidden states, model dtype [tokens, hidden].

        Raises:
            DeadlineExceeded: an FFN instance neither answered nor came back in ``deadlines.ffn_s``.
            PeerLost: one died in the step before this one, and ``pipeline.lookahead`` is on.
        """
        self.settle()
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            return self.runnable(*args, **kwargs)
        descriptor = context.batch_descriptor
        assert descriptor is not None, "vLLM names the shape of every step that it wants replayed"
        depth = len(context.ubatch_slices) if context.ubatch_slices else 1
        while True:
            self._host.begin_step(depth)
            self._drop_graphs_of_ended_sessions()
            self.concrete_cudagraph_entries = self._entries.setdefault(depth, {})
            step = self._steps.get((depth, descriptor))
            if step is None:
                step = self._capture(context, args, kwargs)
                self._steps[depth, descriptor] = step
            self._host.announce(descriptor.num_tokens)
            began_ns = time.monotonic_ns()
            self._began.record()
            output = super().__call__(*args, **kwargs)
            self._ended.record()
            guard = self._region.guard(self._streams.compute, step.waits.slots, step.waits.flags)
            timeout_us = int(self._deadline_s * 1e6)
            if self._watcher is not None:
                judge = partial(self._check, step.marks, depth, began_ns)
                self.running = Running(self._watcher.submit(guard.wait, timeout_us), judge)
                return output
            if self._through(guard.wait(timeout_us)):
                self._finish(step.marks, depth, began_ns)
                return output

    def settle(self) -> None:
        """Wait for the step that the host went on from, if there is one. See :class:`Running`."""
        running, self.running = self.running, None
        if running is not None:
            running.settle()

    def _finish(self, marks: Marks, depth: int, began_ns: int) -> None:
        """A replay is through. Its marks are read now and then: it takes microseconds for each."""
        self._host.end_step()
        self._metrics.graph_steps[depth] += 1
        self._metrics.graph_seconds[depth] += self._began.elapsed_time(self._ended) / 1e3
        self._replays += 1
        if self._stage_every and self._replays % self._stage_every == 0:
            step = marks.read(began_ns, replayed=True)
            if step is not None:
                self._metrics.note_replay(step)

    def _drop_graphs_of_ended_sessions(self) -> None:
        """Graphs hold addresses of their peers' memory, and doorbells of their sessions."""
        if self._host.peers != self._peers:
            self.clear_graphs()
            self._peers = self._host.peers

    def _capture(
        self, context: ForwardContext, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]
    ) -> _Step:
        marks = new_marks(self._streams, 0, self._stage_every)
        waits = self._stream.record(self._host.peers, marks)
        set_cudagraph_capturing_enabled(True)  # vLLM turns it off after the start
        self.runnable.remote = self._stream
        try:
            with self._streams.capturable():  # vLLM serves on the default stream
                super().__call__(*args, **kwargs)
        finally:
            self.runnable.remote = self._host
        return _Step(waits, marks, context)

    def _through(self, statuses: Sequence[Status]) -> bool:
        """Whether a replay went well; False if an FFN instance died in it and is back now.

        The host has to know before it samples: garbage must not become a token. A step that is run
        again writes the same keys and values to the same places.
        """
        gone = self._gone(statuses)
        self._host.renew(gone)
        return not gone

    def _check(self, marks: Marks, depth: int, began_ns: int, statuses: Sequence[Status]) -> None:
        """As :meth:`_through`, of a step that cannot be run again."""
        gone = self._gone(statuses)
        if gone:
            raise PeerLost(
                f"{self._names(gone)} died in a step that cannot be run again because"
                " pipeline.lookahead is on; the engine ends, and its requests with it"
            )
        self._finish(marks, depth, began_ns)

    def _gone(self, statuses: Sequence[Status]) -> tuple[int, ...]:
        """FFN instances that died in a step. Raises DeadlineExceeded where one is late."""
        gone, late = failed_peers(statuses, len(self._peers))
        if late:
            raise DeadlineExceeded(
                f"{self._names(late)} did not answer a step within {self._deadline_s:g} s; look at"
                " its log, or raise deadlines.ffn_s if its experts are that slow"
            )
        return gone

    def _names(self, ffns: Sequence[int]) -> str:
        return ", ".join(self._peers[j].id for j in ffns)
