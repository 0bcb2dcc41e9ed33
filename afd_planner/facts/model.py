"""The planner's view of a model: the attention and FFN of every layer.

``model_hf.load_model("step-3")`` reads afd_planner/data/models/step-3.yaml, which holds the
publisher's config.json keys and their source. ``load_model("path/to/folder")`` reads the
config.json of any checkpoint.
"""

from dataclasses import dataclass
from functools import cached_property

from afd_planner.facts.attention import Attention, projection_parameters
from afd_planner.facts.ffn import Ffn, MoeFfn


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same attention and FFN. ``layers``: their indices, ascending."""

    layers: tuple[int, ...]
    attention: Attention
    ffn: Ffn


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a model. ``groups`` partition the layers 0..num_layers-1.

    Attributes:
        tied: Whether embedding and LM head share weights.
        max_context: Tokens; 0 if unknown.
        dtype: Number format of the published weights.
        published_total: Parameters according to the model card; 0 if not stated.
        published_activated: Parameters used per token according to the model card, or 0.
        sources: Origin of the facts, one line each.
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
        """Indices of the mixture-of-experts layers, whose FFNs `afd serve` disaggregates."""
        found = (g.layers for g in self.groups if isinstance(g.ffn, MoeFfn))
        return tuple(sorted(layer for layers in found for layer in layers))

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embedding and LM head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Parameters of all weight matrices, without norms, biases and multimodal encoders."""
        return self.embedding_parameters + sum(
            len(g.layers)
            * (projection_parameters(g.attention) + g.ffn.parameters + g.ffn.router_parameters)
            for g in self.groups
        )

    @property
    def activated_parameters(self) -> int:
        """Matrix parameters that one token uses, with the LM head, without the embedding."""
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
        """Returns the cache bytes of one sequence of ``context`` tokens, over all layers."""
        return sum(len(g.layers) * g.attention.kv_stored_bytes(context, dtype) for g in self.groups)
