"""The router stays on the attention instance, the experts do not.

Registers a RoutedExperts without weights, and runs vLLM's own top-k.
"""

import torch
from torch import nn
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from afd.models import Family
from attention_worker.model import Router


class RemoteExpertsMethod(FusedMoEMethodBase):
    """Creates no weights. vLLM never reaches its ``apply``: the pipeline calls the FFN instead."""

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        """Creates nothing: the experts are on the FFN instances."""

    def get_fused_moe_quant_config(self, layer: nn.Module) -> FusedMoEQuantConfig | None:
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Does nothing: there are no weights to pack."""


class RemoteRoutedExperts(RoutedExperts):
    """vLLM's RoutedExperts with its routing parameters and without its weights."""

    def _get_quant_method(
        self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        return RemoteExpertsMethod(moe_config)


def register_remote_experts() -> None:
    """Makes vLLM build :class:`RemoteRoutedExperts` wherever a model asks for RoutedExperts.

    This is vLLM's out-of-tree hook (vllm/model_executor/custom_op.py: PluggableLayer).
    """
    PluggableLayer.register_oot(_decorated_layer_cls=RemoteRoutedExperts, name="RoutedExperts")


def make_router(layer: nn.Module, family: Family) -> Router:
    """Returns the router of a decoder layer: vLLM's gate, then vLLM's top-k for this platform."""
    gate, runner = layer.get_submodule(family.gate), layer.get_submodule(family.experts)
    top_k = _top_k_cpu if current_platform.is_cpu() else _top_k

    def route(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _ = gate(hidden)
        weights, ids = top_k(runner, hidden, logits)
        return weights.float().contiguous(), ids.int().contiguous()

    return route


def _top_k(
    runner: MoERunner, hidden: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = runner.router.select_experts(hidden_states=hidden, router_logits=logits)
    return weights, ids


def _top_k_cpu(
    runner: MoERunner, hidden: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # On CPU, vLLM 0.26 routes inside the wrapper of the expert kernel, not in the router object
    # (vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py: apply_monolithic).
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    experts = runner.routed_experts
    weights, ids = select_experts(
        hidden_states=hidden,
        router_logits=logits,
        top_k=experts.top_k,
        use_grouped_topk=experts.use_grouped_topk,
        renormalize=experts.renormalize,
        topk_group=experts.topk_group,
        num_expert_group=experts.num_expert_group,
        custom_routing_function=experts.custom_routing_function,
        scoring_func=experts.scoring_func,
        routed_scaling_factor=experts.routed_scaling_factor,
        e_score_correction_bias=experts.e_score_correction_bias,
    )
    return weights, ids
