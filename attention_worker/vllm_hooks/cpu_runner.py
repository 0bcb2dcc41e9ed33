"""What attention instances on CPUs add to both of vLLM's model runners."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from attention_worker.vllm_hooks.cpu_attention import call_kernels_directly
from attention_worker.vllm_hooks.cpu_norms import use_c_norms
from attention_worker.vllm_hooks.instance_runner import InstanceRunner
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


class CpuInstanceRunner(InstanceRunner):
    """Mixin for a vLLM model runner on CPUs, in front of the one of its generation.

    Computes norms by vLLM's C kernels, and calls those of Qwen3-MoE's attention directly. Fixes
    float32 gates in bfloat16 models, attention sinks in float32 (vLLM before 0.31), and adapters of
    some requests of a step.
    """

    def load_model(self, load_dummy_weights: bool = False, **further: Any) -> None:
        super().load_model(load_dummy_weights, **further)
        restore_linear_dtypes(self.get_model())
        use_c_norms(self.get_model())
        family = self._instance.family
        if not family.split:
            call_kernels_directly(self.get_model().halves, family, self.vllm_config)
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
