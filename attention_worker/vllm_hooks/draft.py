"""A vLLM model of draft layers (MTP) with remote experts, derived from the class that vLLM ships.

A draft layer is a decoder layer behind two norms and a projection. vLLM's proposer runs it once per
draft token (vllm/v1/spec_decode/llm_base_proposer.py: propose).
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.config import VllmConfig

from afd.models import Family
from attention_worker.draft_layer import DraftExperts, run_draft_layer
from attention_worker.model import LayerHalves
from attention_worker.vllm_hooks.model import drop_shared_experts
from attention_worker.vllm_hooks.routing import make_router

SHARED_WEIGHTS = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")
"""vLLM replaces these by the target model's (llm_base_proposer.py: _maybe_share_embeddings)."""

_Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class DraftModel(nn.Module):
    """Draft layers with remote experts; see :class:`attention_worker.instance.AttentionModel`."""

    weight_bytes_read: int
    weight_bytes_held: int

    def attach(self, remote: DraftExperts, moe_layers: tuple[int, ...]) -> None:
        """Connects the draft layers, which have these numbers, to the FFN instances."""
        raise NotImplementedError


class _Drafting(DraftModel):
    """The part of what :func:`drafting` returns that is ours."""

    disaggregated_as: Family

    def attach(self, remote: DraftExperts, moe_layers: tuple[int, ...]) -> None:
        family, blocks = self.disaggregated_as, self.blocks()
        for index in moe_layers:
            block = blocks[index]
            halves = LayerHalves(block, index, family, make_router(block, family))
            vars(block)["forward"] = _forward(halves, remote)

    def blocks(self) -> dict[int, nn.Module]:
        """Returns the decoder layers of the draft layers, by number."""
        layers = self.get_submodule("model.layers").named_children()
        return {int(name): layer.get_submodule("mtp_block") for name, layer in layers}


def drafting(base: type[nn.Module], family: Family) -> type[nn.Module]:
    """Returns a subclass of the vLLM model class ``base`` whose decoder layers call the FFN."""

    class Drafting(base, _Drafting):  # type: ignore[valid-type,misc]  # known at run time only
        """The draft layers without expert weights."""

        disaggregated_as = family

        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for block in self.blocks().values():
                drop_shared_experts(block, family)

    Drafting.__name__ = Drafting.__qualname__ = f"Afd{base.__name__}"
    return Drafting


def _forward(halves: LayerHalves, remote: DraftExperts) -> _Forward:
    """Returns the ``forward`` of a decoder layer."""

    def forward(
        positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return run_draft_layer(halves, remote, positions, hidden_states, residual)

    return forward
