"""Decode steps of an attention instance as captured graphs, transport included.

vLLM captures and replays the whole model for uniform decode steps
(vllm/compilation/cuda_graph.py: CUDAGraphWrapper, mode FULL). Added here: the depth is part of the
key, the FFN ranks are told of a step before it is replayed, and a step in which an FFN rank dies is
run again, without a graph, once that rank is back.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    override_forward_context,
)

from afd.wire.streams_torch import synchronize
from attention_worker.remote.host import RemoteExperts
from attention_worker.remote.replay_guard import CapturedStep, ReplayGuard
from attention_worker.remote.sessions import FfnSession
from attention_worker.remote.stream import StreamExperts

if TYPE_CHECKING:
    from torch import nn


class StepGraphs(CUDAGraphWrapper):
    """The model as vLLM calls it: uniform decode steps run as graphs, other steps eagerly."""

    def __init__(
        self,
        model: "nn.Module",
        vllm_config: VllmConfig,
        host: RemoteExperts,
        stream: StreamExperts,
        guard: ReplayGuard,
    ) -> None:
        """host, stream: both forms of the remote experts. ``model.remote`` is ``host`` except
        during a capture."""
        super().__init__(model, vllm_config, runtime_mode=CUDAGraphMode.FULL)
        self._host = host
        self._stream = stream
        self._guard = guard
        self._peers: tuple[FfnSession, ...] = ()
        self._entries: dict[int, dict[BatchDescriptor, CUDAGraphEntry]] = {}
        self._steps: dict[tuple[int, BatchDescriptor], CapturedStep] = {}

    def clear_graphs(self) -> None:
        """Drops every graph; the next step of each shape is captured again."""
        super().clear_graphs()
        self._entries.clear()
        self._steps.clear()
        # PyTorch's allocator refuses to capture into a pool whose graphs are all gone.
        self.graph_pool = torch.cuda.graph_pool_handle()

    def __call__(self, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Returns the final hidden states, model dtype [tokens, hidden]. With
        ``pipeline.lookahead`` only streams may use them before :meth:`ReplayGuard.wait_for_step`.

        Raises:
            DeadlineExceeded: an FFN rank neither answered nor came back in ``deadlines.ffn_s``.
            PeerLost: a step could not be run again.
        """
        self._guard.wait_for_step()
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            hidden: torch.Tensor = self.runnable(*args, **kwargs)
            return hidden
        descriptor = context.batch_descriptor
        assert descriptor is not None, "vLLM sets the descriptor of every step it wants replayed"
        depth = len(context.ubatch_slices) if context.ubatch_slices else 1
        self._host.begin_step(depth)
        self._drop_graphs_of_ended_sessions()
        self.concrete_cudagraph_entries = self._entries.setdefault(depth, {})
        step = self._steps.get((depth, descriptor))
        if step is None:
            step = self._capture(context, depth, args, kwargs)
            self._steps[depth, descriptor] = step
        self._host.announce(descriptor.num_tokens)
        self._guard.observer.begin()
        output: torch.Tensor = super().__call__(*args, **kwargs)
        self._guard.observer.queued()
        self._guard.watch(step, partial(self._run_eagerly, context, args, kwargs, output))
        return output

    def _run_eagerly(
        self,
        context: ForwardContext,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, object],
        output: torch.Tensor,
    ) -> None:
        """Runs a step in host form. args, kwargs: vLLM's input buffers. output: of the graph."""
        with torch.inference_mode(), override_forward_context(context):
            output.copy_(self.runnable(*args, **kwargs))
        synchronize(output.device)

    def _drop_graphs_of_ended_sessions(self) -> None:
        """A graph holds addresses in the memory of its peers, and doorbells of their sessions."""
        if self._host.peers != self._peers:
            self.clear_graphs()
            self._peers = self._host.peers

    def _capture(
        self,
        context: ForwardContext,
        depth: int,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, object],
    ) -> CapturedStep:
        streams = self._stream.streams
        timestamps = self._guard.observer.new_timestamps(streams)
        waits = self._stream.record(self._host.peers, timestamps)
        set_cudagraph_capturing_enabled(True)  # vLLM turns it off after start-up
        self.runnable.remote = self._stream
        try:
            with streams.capturable():  # vLLM serves on the default stream
                super().__call__(*args, **kwargs)
        finally:
            self.runnable.remote = self._host
        return CapturedStep(
            depth, waits, timestamps, kept_alive=context, rows_sent=lambda: self._stream.rows_sent
        )
