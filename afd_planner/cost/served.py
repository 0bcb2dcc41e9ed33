"""Memory of the GPUs of a deployment file, as `afd serve` fills it. Pure.

The planner's own budget (:mod:`afd_planner.cost.budget`) is for plans, which may use formats that
`afd serve` does not have. This one is for files: weights in the format in which they are served,
the KV cache of the file, and the slots of the transport.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from afd.topology import SlotMap
from afd_planner.facts.attention import projection_parameters
from afd_planner.facts.ffn import DenseFfn, MoeFfn
from afd_planner.facts.model import ModelSpec

USABLE = 0.92
"""Share of a GPU's memory for all that is counted here. The rest is for the driver's context,
activations and graphs. It is the planner's own share (``Efficiency.memory_use``)."""

SERVED_ATTENTION = "bfloat16"
"""Format in which a deployment file is checked to hold attention weights. vLLM may hold those of an
FP8 checkpoint in fewer bytes."""

TOKENS_PER_BLOCK = 1024
"""Limits of a deployment file are rounded up to a multiple of this."""

STEP_TOKENS = 2 * TOKENS_PER_BLOCK
"""Smallest limit of tokens per step in a deployment file."""


def round_up(tokens: float) -> int:
    """Returns ``tokens``, rounded up to a multiple of TOKENS_PER_BLOCK."""
    return math.ceil(tokens / TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK


def step_tokens(sequences: float) -> int:
    """Returns ``max_num_batched_tokens`` for an attention instance of ``sequences`` sequences.

    It is also the number of rows of every slot, of which an FFN rank has one per attention instance
    and micro-batch.
    """
    return max(round_up(sequences), STEP_TOKENS)


@dataclass(frozen=True)
class Buffers:
    """Slots of the transport. to_ffn, to_attention: bytes of one slot in each direction.

    copied: links send from buffers of their own, as between hosts. Inside a host they write into
    the receiver's slots.
    """

    slots: SlotMap
    to_ffn: int
    to_attention: int
    copied: bool

    @property
    def attention(self) -> int:
        """Bytes on one attention instance."""
        received = self.slots.attention_region_slots * self.to_attention
        sent = self.slots.ffn_ranks * (self.slots.max_depth + 1) * self.to_ffn
        return received + (sent if self.copied else 0)

    @property
    def ffn(self) -> int:
        """Bytes on one FFN rank."""
        received = self.slots.ffn_region_slots * self.to_ffn
        sent = self.slots.attention_ranks * self.slots.max_depth * self.to_attention
        return received + (sent if self.copied else 0)


@dataclass(frozen=True)
class GpuUse:
    """Bytes on one GPU of a pool. pool: "attention" or "ffn"."""

    pool: str
    weights: float
    cache: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.buffers

    def fits(self, memory_bytes: float) -> bool:
        return self.total <= USABLE * memory_bytes


def attention_weights(model: ModelSpec, unit: float) -> float:
    """Bytes of an attention instance's weights. unit: bytes per value.

    It holds everything except routed and shared experts.
    """
    layers = sum(
        len(g.layers)
        * (
            projection_parameters(g.attention)
            + g.ffn.router_parameters
            + (g.ffn.parameters if isinstance(g.ffn, DenseFfn) else 0)
        )
        for g in model.groups
    )
    return (layers + model.embedding_parameters) * unit


def ffn_weights(model: ModelSpec, unit: float, instances: int, tp: int, redundant: int) -> float:
    """Bytes of the weights of the fullest FFN rank.

    It holds its slice of the experts of its instance, of ``redundant`` copies per layer, and of the
    shared experts.
    """
    total = 0.0
    for group in model.groups:
        if isinstance(group.ffn, MoeFfn):
            experts = math.ceil(group.ffn.experts / instances) + redundant
            shared = group.ffn.shared_parameters / instances
            total += len(group.layers) * (experts * group.ffn.expert_parameters + shared)
    return total * unit / tp
