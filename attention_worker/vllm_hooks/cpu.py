"""CPU worker and runner of an attention instance, derived from vLLM's.

Kept apart from the GPU ones, because importing vLLM's CPU worker replaces torch's CUDA streams with
stubs (vllm/v1/worker/cpu/shm.py).
"""

import os
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from afd.config.roles import load_role
from afd.host.affinity import bind_process
from attention_worker.instance import reported
from attention_worker.ranks import cores_of_rank
from attention_worker.vllm_hooks.cpu_norms import use_c_norms
from attention_worker.vllm_hooks.draft_kernels import put_draft_kernels
from attention_worker.vllm_hooks.runner import DisaggregatedRunner
from attention_worker.vllm_hooks.store import file_store
from attention_worker.vllm_hooks.support import check_runner
from attention_worker.vllm_hooks.versions import layout


class CpuAdapterRows(PunicaWrapperCPU):
    """vLLM's LoRA arithmetic for CPUs, right for rows without an adapter beside rows with one.

    Such a row has the index -1, which vLLM takes as the last adapter of the tensor
    (vllm/lora/ops/torch_ops/lora_ops.py: bgmv_shrink). Here its product with A is 0. Model runners
    use the prefill form in every step (vllm/v1/worker/lora_model_runner_mixin.py).
    """

    def _shrink_prefill(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
    ) -> None:
        super()._shrink_prefill(y, x, w_t_all, scale)
        if not self.no_lora:  # then the step is not split, so that y has all of its rows
            y[self.token_lora_indices < 0] = 0


class AfdCpuModelRunner(DisaggregatedRunner, CPUModelRunner):
    """CPU runner of an attention instance, with vLLM's C kernels for norms. Fixes float32 gates in
    bfloat16 models, attention sinks in float32 (vLLM before 0.31), and requests with a seed and a
    chunked prompt.

    A request with a seed draws random numbers in every step, also in the steps that prefill a chunk
    of its prompt. vLLM then rewinds the generator by its offset, but CPU generators have none: vLLM
    raises, and the engine ends (gpu_model_runner.py: _bookkeeping_sync). This class restores the
    state of the generator instead, so a seed gives the same tokens however the prompt is chunked.
    """

    def load_model(self, load_dummy_weights: bool = False, **further: Any) -> None:
        super().load_model(load_dummy_weights, **further)
        restore_linear_dtypes(self.get_model())
        use_c_norms(self.get_model())
        if not layout().cpu_sinks_bfloat16:
            return
        # The CPU kernel reads attention sinks as bfloat16, whatever the model's dtype
        # (csrc/cpu/cpu_attn.cpp: s_aux), and fails on others. Published sinks are bfloat16.
        for module in self.get_model().modules():
            if isinstance(module, Attention) and isinstance(module.impl, CPUAttentionBackendImpl):
                sinks = module.impl.sinks
                module.impl.sinks = None if sinks is None else sinks.bfloat16()

    def load_lora_model(
        self, model: nn.Module, vllm_config: VllmConfig, device: torch.device
    ) -> nn.Module:
        loaded = super().load_lora_model(model, vllm_config, device)
        for module in loaded.modules():
            if isinstance(module, BaseLayerWithLoRA):
                module.punica_wrapper.__class__ = CpuAdapterRows
        return loaded

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        generators = self.input_batch.generators
        kept = [(g, g.get_state()) for i, g in generators.items() if self._still_prefilling(i)]
        output = super()._sample(logits, spec_decode_metadata)
        for generator, state in kept:
            generator.set_state(state)
        return output

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
    ) -> tuple[Any, ...]:
        generators = self.input_batch.generators
        self.input_batch.generators = {
            i: g for i, g in generators.items() if not self._still_prefilling(i)
        }
        try:
            result: tuple[Any, ...] = super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
            return result
        finally:
            self.input_batch.generators = generators

    def _still_prefilling(self, request: int) -> bool:
        """Returns whether vLLM discards this step's token of the request with this batch index."""
        return bool(self.discard_request_mask.np[request])


def restore_linear_dtypes(model: nn.Module) -> None:
    """Gives emptied weights of linear layers the dtype of the packed copies that replaced them.

    On CPUs vLLM packs a weight and leaves an empty one in the model's dtype
    (vllm/model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm). A float32 gate of a
    bfloat16 model, as in MiniMax-M2, converts its input to the dtype of that empty weight. The
    product then writes float32 results into a bfloat16 tensor, beyond its end.
    """
    for module in model.modules():
        if not isinstance(module, LinearBase):
            continue
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel() == 0 and weight.dtype != module.params_dtype:
            module.weight = nn.Parameter(weight.data.to(module.params_dtype), requires_grad=False)


class AfdCpuWorker(CPUWorker):
    """vLLM's CPU worker with the disaggregated model runner, bound to the instance's cores.

    vLLM binds CPU workers through the OpenMP environment of the processes that its "mp" executor
    starts. With "uni" it ignores VLLM_CPU_OMP_THREADS_BIND (vllm/utils/ompmultiprocessing.py).
    Unbound, the threads of attention would take the cores of FFN instances. vLLM's HTTP process
    stays unbound.

    The runner class is swapped on the instance: vLLM hard-codes it inside ``init_device``
    (vllm/v1/worker/cpu_worker.py:183), and a second runner would allocate every buffer twice.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        with reported():  # first: vLLM allocates on the NUMA node of the first allowed core
            ranks = vllm_config.parallel_config.world_size
            bind_process(cores_of_rank(load_role().cpus, rank, ranks), "attention.cpus")
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)

    def init_device(self) -> None:
        with reported():
            check_runner(self.vllm_config)
        self.distributed_init_method = file_store(self.rank, self.parallel_config.world_size)
        super().init_device()
        self.model_runner.__class__ = AfdCpuModelRunner
        if layout().cpu_draft_kernels_missing:
            put_draft_kernels()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        before = os.sched_getaffinity(0)
        super().initialize_from_config(kv_cache_config)
        # NixlConnector binds this thread to the last core of each NUMA node
        # (nixl/base_worker.py: rsv_cores_for_kv).
        os.sched_setaffinity(0, before)

    def shutdown(self) -> None:
        self.model_runner.close_instance()
        super().shutdown()
