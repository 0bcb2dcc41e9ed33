"""A model as the planner sees it: which attention and which FFN every layer has.

``model_hf.load_model("step-3")`` reads configs/models/step-3.yaml, which holds the publisher's
config.json keys and their source; ``load_model("path/to/folder")`` reads any checkpoint's.
"""

from dataclasses import dataclass
from functools import cached_property

from afd.planner.facts.attention import Attention, projection_parameters
from afd.planner.facts.ffn import Ffn, MoeFfn


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind. ``layers`` are their indices, ascending."""

    layers: tuple[int, ...]
    attention: Attention
    ffn: Ffn


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a model. ``groups`` partition its layers 0..num_layers-1.

    tied: embedding and LM head share weights. max_context: tokens, 0 where unknown. dtype: of the
    published weights. published_total, published_activated: parameters by the publisher's model
    card, 0 where it states none. sources: where the facts come from, one line each.
    """

    name: str
    title: str
    architecture: str
    hidden: int
    vocab: int
    tied: bool
    groups: tuple[LayerGroup, ...]
    max_context: int
    dtype: str
    published_total: float = 0.0
    published_activated: float = 0.0
    sources: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the mixture-of-experts layers: those that `afd serve` disaggregates."""
        found = (g.layers for g in self.groups if isinstance(g.ffn, MoeFfn))
        return tuple(sorted(layer for layers in found for layer in layers))

    @property
    def embedding_parameters(self) -> int:
        """Embedding and LM head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All weight matrices; norms, biases and encoders of other modalities are left out."""
        return self.embedding_parameters + sum(
            len(g.layers)
            * (projection_parameters(g.attention) + g.ffn.parameters + g.ffn.router_parameters)
            for g in self.groups
        )

    @property
    def activated_parameters(self) -> int:
        """Matrix weights that one token uses: with the LM head, without the embedding look-up."""
        return self.vocab * self.hidden + sum(
            len(g.layers)
            * (
                projection_parameters(g.attention)
                + g.ffn.activated_parameters
                + g.ffn.router_parameters
            )
            for g in self.groups
        )

    def kv_stored_bytes(self, context: float, dtype: str) -> float:
        """Cache bytes that one sequence of ``context`` tokens holds, over all layers."""
        return sum(len(g.layers) * g.attention.kv_stored_bytes(context, dtype) for g in self.groups)
