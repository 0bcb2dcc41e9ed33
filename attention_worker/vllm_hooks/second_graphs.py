"""Decode steps of vLLM's second-generation runner as captured graphs, transport included.

vLLM captures the whole model for uniform decode steps and replays it (v1/worker/gpu/
cudagraph_utils.py). Added here, as in :mod:`attention_worker.vllm_hooks.graphs`: each depth has its
own graphs, the FFN ranks are told of a step before it is replayed, and a step in which an FFN rank
dies is run again, without a graph, once that rank is back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CreateForwardFn,
    ModelCudaGraphManager,
)

from afd.wire.streams_torch import synchronize
from attention_worker.remote.host import RemoteExperts
from attention_worker.remote.replay_guard import CapturedStep, ReplayGuard
from attention_worker.remote.sessions import FfnSession
from attention_worker.remote.stream import StreamExperts
from attention_worker.vllm_hooks.cut_state import Prepared
from attention_worker.vllm_hooks.second_dispatch import DepthDispatch

Forward = Callable[[CUDAGraphMode], None]
"""Runs the model on vLLM's input buffers, and copies its output to the manager's."""


class CapturedSteps(DepthDispatch):
    """Captures and replays. vLLM's manager of a model calls it: see :class:`GraphManager`."""

    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]

    def begin_captures(
        self,
        model: Any,
        host: RemoteExperts,
        stream: StreamExperts,
        guard: ReplayGuard,
        *,
        max_depth: int,
        min_rows: int,
    ) -> None:
        """Comes behind :meth:`begin_dispatch`.

        model: as vLLM calls it. host, stream: both forms of the remote experts. ``model.remote`` is
        ``host`` except during a capture. max_depth, min_rows: of a step, and of a micro-batch.
        """
        self.guard = guard
        self._model = model
        self._host = host
        self._stream = stream
        self._depths = range(1, max_depth + 1)
        self._min_rows = min_rows
        self._create: CreateForwardFn | None = None
        self._peers: tuple[FfnSession, ...] = ()
        self._steps: dict[tuple[int, BatchExecutionDescriptor], CapturedStep] = {}
        self._graphs: dict[int, dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]] = {}

    def capture(
        self,
        create_forward_fn: CreateForwardFn,
        progress_bar_desc: str = "Capturing CUDA graphs",
    ) -> None:
        """Captures every shape at each depth that a step of that shape may have."""
        self._create = create_forward_fn
        self._peers = self._host.peers
        for depth in self._depths:
            wanted = {
                mode: kept
                for mode, all_shapes in self._capture_descs.items()
                if (kept := [shape for shape in all_shapes if self._may_have(shape, depth)])
            }
            if wanted:
                self._capture(wanted, depth, f"{progress_bar_desc}, depth {depth}")

    def _may_have(self, shape: BatchExecutionDescriptor, depth: int) -> bool:
        if depth == 1:
            return True
        return not shape.num_active_loras and shape.num_tokens // depth >= self._min_rows

    def _capture(
        self, wanted: dict[CUDAGraphMode, list[BatchExecutionDescriptor]], depth: int, said: str
    ) -> None:
        """Lets vLLM capture these shapes. Overwrites its input buffers."""
        every, self._capture_descs = self._capture_descs, wanted
        self.graphs = self._graphs.setdefault(depth, {})
        self._state.depth = depth
        try:
            super().capture(self._forward, said)
        finally:
            self._capture_descs = every

    def _forward(self, shape: BatchExecutionDescriptor, warmup: bool) -> Forward:
        assert self._create is not None
        forward: Forward = self._create(shape, warmup)
        if warmup:
            return forward
        depth = self._state.depth
        timestamps = self.guard.observer.new_timestamps(self._stream.streams)
        waits = self._stream.record(self._host.peers, timestamps)
        self._steps[depth, shape] = CapturedStep(
            depth,
            waits,
            timestamps,
            kept_alive=self._state.prepared,
            rows_sent=lambda: self._stream.rows_sent,
        )
        return partial(self._in_stream_form, forward)

    def _in_stream_form(self, forward: Forward, mode: CUDAGraphMode) -> None:
        """Runs the model while vLLM captures it."""
        self._model.remote = self._stream
        try:
            forward(mode)
        finally:
            self._model.remote = self._host

    def dispatch(self, *arguments: Any, **named: Any) -> BatchExecutionDescriptor:
        """Also captures the step's shape if it has no valid graph. vLLM has not prepared the
        inputs of the step yet, so its buffers are free."""
        decision = super().dispatch(*arguments, **named)
        if decision.cg_mode != CUDAGraphMode.FULL:
            self.guard.wait_for_step()
            return decision
        self._drop_graphs_of_ended_sessions()
        depth = self._state.depth
        if (depth, decision) not in self._steps:
            self.guard.wait_for_step()
            self._capture({CUDAGraphMode.FULL: [decision]}, depth, f"depth {depth}")
        return decision

    def _drop_graphs_of_ended_sessions(self) -> None:
        """A graph holds addresses in the memory of its peers, and doorbells of their sessions."""
        if self._host.peers == self._peers:
            return
        self.guard.wait_for_step()
        self._peers = self._host.peers
        self._steps.clear()
        self._graphs.clear()
        self.graphs = {}
        # PyTorch's allocator refuses to capture into a pool whose graphs are all gone.
        self.pool = torch.cuda.graph_pool_handle()

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> None:
        """Runs the step that vLLM has prepared. Its output is in the manager's buffer. With
        ``pipeline.lookahead`` only streams may use it before :meth:`ReplayGuard.wait_for_step`.

        Raises:
            DeadlineExceeded: an FFN rank neither answered nor came back in ``deadlines.ffn_s``.
            PeerLost: a step could not be run again.
        """
        self.guard.wait_for_step()
        depth, prepared = self._state.depth, self._state.prepared
        assert prepared is not None
        self._host.begin_step(depth)
        if self._host.peers != self._peers:
            # A capture would overwrite the inputs, so this step runs without a graph.
            self._run_eagerly(prepared, desc.num_tokens)
            return
        self.graphs = self._graphs[depth]
        self._host.announce(desc.num_tokens)
        self.guard.observer.begin()
        super().run_fullgraph(desc)
        self.guard.observer.queued()
        again = partial(self._run_eagerly, prepared, desc.num_tokens)
        self.guard.watch(self._steps[depth, desc], again)

    def _run_eagerly(self, prepared: Prepared, rows: int) -> None:
        """Runs a prepared step in host form."""
        assert self.hidden_states is not None
        batch = prepared.batch
        inputs = self._state.prepare_dummy_inputs(batch.num_reqs_after_padding, rows)
        slots = build_slot_mappings_by_layer(prepared.slot_mappings, prepared.kv_cache_config)
        with (
            torch.inference_mode(),
            set_forward_context(
                prepared.metadata, self.vllm_config, num_tokens=rows, slot_mapping=slots
            ),
        ):
            hidden = self._model(
                **{"input_ids": batch.input_ids, "positions": batch.positions} | inputs
            )
            self.hidden_states[:rows] = hidden
        synchronize(hidden.device)


class GraphManager(ModelCudaGraphManager, CapturedSteps):
    """vLLM's manager of a model's graphs, with our captures and replays below it.

    Its methods call those of :class:`CapturedSteps` by ``super()``, which call vLLM's.
    """
