"""vLLM's worker on the stand-in node: decode steps are captured and replayed.

The runner is the product's for GPUs (attention_worker/vllm_hooks/gpu.py and graphs.py) on top of
vLLM's for CPUs, because vLLM's ROCm platform needs torch for ROCm. Graphs are those of hip.cc. vLLM
pads no step here, so each number of rows has a graph of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import stand_in_rocm
import torch
from vllm.compilation import cuda_graph
from vllm.config import CUDAGraphMode
from vllm.forward_context import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    override_forward_context,
)
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from attention_worker.vllm_hooks.cpu import AfdCpuModelRunner, AfdCpuWorker
from attention_worker.vllm_hooks.gpu import AfdGpuModelRunner
from attention_worker.vllm_hooks.graphs import StepGraphs


class NodeGraphs(StepGraphs):
    """The step's forward context is kept: on a GPU, the memory of attention metadata stays and vLLM
    writes the next step's there; on CPUs vLLM makes new tensors, which replays have to find."""

    context: ForwardContext

    def __call__(self, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        NodeGraphs.context = get_forward_context()
        return super().__call__(*args, **kwargs)


def _with_metadata_of_the_step(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that reads the forward context, for :data:`stand_in_rocm.rebound`."""

    def bind(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        recorded, own = NodeGraphs.context, get_forward_context().attn_metadata
        micro_batch = None
        if recorded.ubatch_slices is not None:
            (micro_batch,) = (i for i, of in enumerate(recorded.attn_metadata) if of is own)

        def run() -> Any:
            context = NodeGraphs.context
            if micro_batch is not None:
                context = replace(
                    context,
                    attn_metadata=context.attn_metadata[micro_batch],
                    slot_mapping=context.slot_mapping[micro_batch],
                    ubatch_slices=None,
                )
            with override_forward_context(context):
                return operation(*args, **kwargs)

        return run

    return bind


class _Unpadded(CPUModelRunner):
    """vLLM's decision of a step, for which its CPU runner knows no graphs."""

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: Any,
        max_num_scheduled_tokens: int,
        *arguments: Any,
        **named: Any,
    ) -> tuple[Any, ...]:
        decision = super()._determine_batch_execution_and_padding(
            num_tokens,
            num_reqs,
            num_scheduled_tokens_np,
            max_num_scheduled_tokens,
            *arguments,
            **named,
        )
        serving = self._scheduled is not None and self._guard is not None
        each = self.uniform_decode_query_len  # 1, or 1 and the drafts
        uniform = max_num_scheduled_tokens == each and num_tokens == num_reqs * each
        if serving and uniform:
            descriptor = BatchDescriptor(num_tokens, num_reqs, uniform=True)
            return CUDAGraphMode.FULL, descriptor, *decision[2:]
        return decision


class NodeRunner(AfdGpuModelRunner, AfdCpuModelRunner, _Unpadded):
    def load_model(self, load_dummy_weights: bool = False, **further: Any) -> None:
        config = self.compilation_config
        before = config.cudagraph_mode  # vLLM has turned it off for CPUs
        if not self.model_config.enforce_eager:
            config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        super().load_model(load_dummy_weights, **further)
        config.cudagraph_mode = before
        if self._guard is not None:
            self.model.__class__ = NodeGraphs


class NodeWorker(AfdCpuWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = NodeRunner
        operations = torch.ops.vllm
        for operation in (
            operations.unified_attention_with_output.default,
            operations.unified_kv_cache_update.default,
        ):
            stand_in_rocm.rebound[operation] = _with_metadata_of_the_step(operation)
        torch.cuda.CUDAGraph = stand_in_rocm.TorchGraph
        torch.cuda.graph = stand_in_rocm.captured
        CpuPlatform.graph_pool_handle = staticmethod(torch.cuda.graph_pool_handle)
        cuda_graph.weak_ref_tensors = lambda tensors: tensors  # not built for CPUs
