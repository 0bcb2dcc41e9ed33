"""The router stays on the attention instance, the experts do not.

Registers a RoutedExperts without weights. In a pipelined model our loop runs vLLM's gate and top-k
(:func:`make_router`). In a split model vLLM's own MoE layer runs them and then calls the remote
experts (:meth:`RemoteRoutedExperts.compute`).
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
from torch import nn
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from afd.models import Family
from attention_worker.model import Router
from attention_worker.pipeline import Experts
from attention_worker.top_k import biased_top_k, softmax_top_k
from attention_worker.vllm_hooks.versions import layout

_TopK: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RemoteRoutedExperts(RoutedExperts):
    """vLLM's RoutedExperts with its routing parameters and without its weights.

    remote, layer: the remote experts, and the number of the layer; set in a split model only.
    """

    remote: Experts | None = None
    layer: int

    def _get_quant_method(
        self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        return RemoteExpertsMethod(moe_config)

    def compute(
        self, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sum of the routed experts, model dtype [rows, hidden].

        Args:
            hidden: model dtype [rows, hidden]. weights, ids: [rows, top_k].
        """
        assert self.remote is not None, "attach() has to come before the first forward"
        if self.apply_router_weight_on_input:  # top_k is 1
            hidden = hidden * weights.to(hidden.dtype)
            weights = torch.ones_like(weights)
        weights, ids = weights.float().contiguous(), ids.int().contiguous()
        self.remote.send(self.layer, 0, hidden.contiguous(), ids, weights)
        # A copy: the answer is in a receive slot, and a model may keep what a layer returns.
        return self.remote.recv(0).clone()


class RemoteExpertsMethod(FusedMoEMethodBase):
    """Creates no weights and calls the remote experts.

    A pipelined model never reaches its ``apply``: the loop calls the FFN instead.
    """

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM leaves the top-k to :meth:`apply_monolithic`: on CPUs, as in vLLM's own."""
        return bool(current_platform.is_cpu())

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

    def apply(
        self,
        layer: RemoteRoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: SharedExperts | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        return layer.compute(x, topk_weights, topk_ids)

    def apply_monolithic(
        self,
        layer: RemoteRoutedExperts,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return layer.compute(x, *_top_k_cpu(layer, x, router_logits))


def register_remote_experts() -> None:
    """Makes vLLM build :class:`RemoteRoutedExperts` wherever a model asks for RoutedExperts.

    This is vLLM's out-of-tree hook (vllm/model_executor/custom_op.py: PluggableLayer).
    """
    PluggableLayer.register_oot(_decorated_layer_cls=RemoteRoutedExperts, name="RoutedExperts")


def connect(model: nn.Module, remote: Experts, moe_layers: tuple[int, ...]) -> None:
    """Gives every MoE layer of a split model its remote experts and its number."""
    experts = [m for m in model.modules() if isinstance(m, RemoteRoutedExperts)]
    assert len(experts) == len(moe_layers), f"{len(experts)} MoE layers, not {moe_layers}"
    for module, layer in zip(experts, moe_layers, strict=True):
        module.remote, module.layer = remote, layer


def make_router(layer: nn.Module, family: Family) -> Router:
    """Returns the router of a decoder layer: vLLM's gate, then vLLM's top-k for this platform."""
    gate, runner = layer.get_submodule(family.gate), layer.get_submodule(family.experts)
    assert isinstance(runner, MoERunner)
    on_cpu = current_platform.is_cpu()

    def route(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Some gates compute in float32, and some also return a bias that is always None.
        logits = gate(hidden.float() if family.float32_gate else hidden)
        logits = logits[0] if isinstance(logits, tuple) else logits
        if on_cpu:
            weights, ids = _top_k_cpu(runner.routed_experts, hidden, logits)
        else:
            weights, ids = runner.router.select_experts(hidden_states=hidden, router_logits=logits)
        return weights.float().contiguous(), ids.int().contiguous()

    return route


def _top_k_cpu(
    experts: RoutedExperts, hidden: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    plain = experts.scoring_func == "softmax" and experts.e_score_correction_bias is None
    other = experts.use_grouped_topk or experts.custom_routing_function
    if plain and experts.renormalize and not other:
        return softmax_top_k(logits, experts.top_k)
    if not (other or plain):
        # Here vLLM's function asserts, or leaves out the bias without a word.
        return biased_top_k(
            logits,
            experts.e_score_correction_bias,
            experts.top_k,
            scoring=experts.scoring_func,
            renormalise=experts.renormalize,
            scaling=experts.routed_scaling_factor,
        )
    weights, ids = _select_experts()(
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


@cache
def _select_experts() -> _TopK:
    # Before 0.30, vLLM's router object is not for CPUs. Its top-k for CPUs is a function in every
    # version, and from 0.30 on the router object calls the same code.
    select: _TopK = importlib.import_module(layout().cpu_top_k_module).select_experts
    return select
