"""Decode steps of an attention instance as captured graphs, transport included.

vLLM captures and replays the model as a whole where a step is uniform decode
(vllm/compilation/cuda_graph.py: CUDAGraphWrapper, mode FULL). What is added here: the depth is part
of the key, the FFN instances are told of a step before it is replayed, and a step whose peer dies
is run again when the peer is back.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, ForwardContext, get_forward_context

from afd.errors import DeadlineExceeded
from afd.metrics import RoleMetrics
from afd.step_trace import Marks, new_marks
from afd.wire.streams_torch import Streams
from afd_comm import Region
from attention_worker.remote import Ffn, RemoteExperts
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


class StepGraphs(CUDAGraphWrapper):
    """The model as vLLM calls it: graphs for uniform decode, else as it is."""

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
    ) -> None:
        super().__init__(model, vllm_config, runtime_mode=CUDAGraphMode.FULL)
        self._host = host
        self._stream = stream
        self._region = region
        self._streams = streams
        self._deadline_s = deadline_s
        self._stage_every = stage_every
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

    def __call__(self, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Final hidden states, model dtype [tokens, hidden].

        Raises:
            DeadlineExceeded: an FFN instance neither answered nor came back in ``deadlines.ffn_s``.
        """
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
            if self._through(step.waits):
                self._host.end_step()
                self._metrics.graph_steps[depth] += 1
                self._metrics.graph_seconds[depth] += self._began.elapsed_time(self._ended) / 1e3
                self._note_stages(step.marks, began_ns)
                return output

    def _note_stages(self, marks: Marks, began_ns: int) -> None:
        """The marks of a replay, read by the host now and then: it takes microseconds for each."""
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
            super().__call__(*args, **kwargs)
        finally:
            self.runnable.remote = self._host
        return _Step(waits, marks, context)

    def _through(self, waits: Waits) -> bool:
        """Wait for the replay; False if an FFN instance died in it and is back now.

        The host has to know before it samples: garbage must not become a token. A step that is run
        again writes the same keys and values to the same places.
        """
        guard = self._region.guard(self._streams.compute, waits.slots, waits.flags)
        gone, late = failed_peers(guard.wait(int(self._deadline_s * 1e6)), len(self._peers))
        if late:
            names = ", ".join(self._peers[j].id for j in late)
            raise DeadlineExceeded(
                f"{names} did not answer a step within {self._deadline_s:g} s; look at its log, or "
                "raise deadlines.ffn_s if its experts are that slow"
            )
        self._host.renew(gone)
        return not gone
