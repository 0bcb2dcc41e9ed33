"""The part of every MoE layer that one rank of an FFN instance holds."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ffn_worker.moe.quantise import Weight

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Shard:
    """The part of every MoE layer that one rank of an FFN instance holds.

    slots: half-open range of the instance's expert slots (afd/placement/tables.py).
    total_slots: the number of expert slots of all instances.
    experts: by layer number, the routed expert in each slot of the instance, or EMPTY.
    width: half-open slice of the routed experts' intermediate dimension.
    shared: half-open slice of the shared experts' intermediate dimension; None if the model has no
        shared expert.
    """

    slots: tuple[int, int]
    total_slots: int
    experts: Mapping[int, tuple[int, ...]]
    width: tuple[int, int]
    shared: tuple[int, int] | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer of a shard, on the device that computes it; gate rows before up rows.

    w13 [E_local, 2*I, H] and w2 [E_local, H, I], I: the shard's width, in the scheme that the
    loader was asked for. shared_gate_up [2*Is_local, H] or None, shared_down [H, Is_local] or None:
    as stored, or in the serving dtype where the slice cuts a block.
    w13_bias [E_local, 2*I] and w2_bias [E_local, H] in the serving dtype; None: the model has none.
    """

    w13: Weight
    w2: Weight
    shared_gate_up: Weight | None
    shared_down: Weight | None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
