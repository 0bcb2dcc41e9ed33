"""The attention and FFN pools that a request may use, with stage times as lines in rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from afd_planner.cost.budget import attention_memory, ffn_memory
from afd_planner.cost.disaggregated import attention_stage, ffn_stage
from afd_planner.cost.interpolate import Array
from afd_planner.cost.served import SERVED_ATTENTION, attention_weights
from afd_planner.cost.shape import EVEN_ROUTING, AfdShape, Pool, Routing
from afd_planner.cost.stages import StageTime
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import LayerGroup, ModelSpec
from afd_planner.facts.precision import dtype_bytes
from afd_planner.sizing.factors import held_fixed_s
from afd_planner.sizing.lines import (
    ExpertLines,
    Line,
    RestLines,
    StageLines,
    line_through,
    stack,
)
from afd_planner.sizing.request import Request

NARROWEST = 128
"""Fewest intermediate columns per GPU under TP: one block of FP8 scales."""

REDUCE = "reduce"
"""Part of an attention stage that adds up the answers of the FFN instances."""


@dataclass(frozen=True)
class FfnPools:
    """FFN pools of one accelerator: arrays [n] over (instances, TP, redundant experts).

    Attributes:
        redundant: Copies of experts per expert-parallel group and layer.
        weights: Bytes on the fullest GPU.
    """

    accelerator: Accelerator
    gpus: int  # per instance
    instances: Array
    tp: Array
    redundant: Array
    weights: Array
    groups: tuple[ExpertLines | None, ...]  # per layer group; None if its FFN runs with attention


@dataclass(frozen=True)
class AttentionPools:
    """Attention pools of one accelerator and TP; the number of instances is open.

    Attributes:
        groups: Attention stage per layer group.
        reduces: Per layer group, seconds per row to add up the answers of the FFN instances, as a
            line in the number of FFN instances. None if the FFN runs with attention.
        weights: Bytes on each GPU, as `afd serve --check` counts them; of a stated layout, in the
            planned format.
        weights_share: Share of the usable memory that weights take.
    """

    accelerator: Accelerator
    gpus: int  # per instance
    tp: int
    groups: tuple[StageLines, ...]
    reduces: tuple[Line | None, ...]
    rest: RestLines
    weights: float
    weights_share: float


def remote(model: ModelSpec, group: LayerGroup) -> bool:
    """Returns whether the group's FFN runs in the FFN pool.

    These are the MoE layers, or all layers of a model without experts.
    """
    return isinstance(group.ffn, MoeFfn) or not model.moe_layers


def shape_of(
    request: Request,
    attention: Pool,
    ffn: Pool,
    depth: int,
    rows: float,
    *,
    wire: str = "exact",
    context: float | None = None,
    routing: Routing = EVEN_ROUTING,
) -> AfdShape:
    """Returns the cost model's shape of one unit of this request; ``rows`` per micro-batch."""
    return AfdShape(
        attention,
        ffn,
        depth,
        rows,
        request.context.mean if context is None else context,
        replace(request.precision, wire=wire),
        routing,
        dense_on_ffn=not request.model.moe_layers,
        draft=request.positions - 1,
    )


def attention_pools(
    request: Request, accelerator: Accelerator, gpus: int, tp: int
) -> AttentionPools | None:
    """Returns the pools, or None if the weights do not fit."""
    model, efficiency = request.model, request.roofline
    pool = Pool(accelerator, 1, gpus, tp)

    def probe(rows: float, context: float) -> AfdShape:
        return shape_of(request, pool, pool, 1, rows * pool.groups, context=context)

    use = attention_memory(model, probe(1, 1), efficiency)
    # Dense models are not served, and a stated layout may be another system's.
    if model.moe_layers and request.afd_layout is None:
        use = replace(use, weights=attention_weights(model, dtype_bytes(SERVED_ATTENTION)))
    if not use.fits:
        return None
    groups: list[StageLines] = []
    reduces: list[Line | None] = []
    for group in model.groups:
        own = not remote(model, group)

        def stage(rows: float, length: float, y: int = 1) -> StageTime:
            shape = replace(probe(rows, length), ffn=replace(pool, instances=y))
            return attention_stage(group, shape, efficiency, local_ffn=own)  # noqa: B023 - called here

        at_length = [
            StageLines.of(*(_without_reduce(stage(rows, length)) for rows in (1, 2)))
            for length in request.context.lengths
        ]
        lines = StageLines.mean(at_length, request.context.shares)
        held = held_fixed_s(request, accelerator, group, handed_over=not own)
        groups.append(replace(lines, overhead_s=lines.overhead_s - held))
        by_instances = [_reduce_s(stage(1, 1, y)) for y in (1, 2)]
        reduces.append(None if own else line_through(*by_instances))
    rest = RestLines.of(model, accelerator, request.precision, tp, efficiency)
    share = use.weights / use.usable
    return AttentionPools(
        accelerator, gpus, tp, tuple(groups), tuple(reduces), rest, use.weights, share
    )


def _without_reduce(stage: StageTime) -> StageTime:
    return replace(stage, parts=tuple(part for part in stage.parts if part.name != REDUCE))


def _reduce_s(stage: StageTime) -> float:
    return sum(part.seconds for part in stage.parts if part.name == REDUCE)


def ffn_pools(
    request: Request, accelerator: Accelerator, gpus: int, most: int, wire: str
) -> FfnPools | None:
    """Returns the pools of up to ``most`` instances that hold all experts, or None.

    ``wire`` is the format of arriving rows, which the GPUs of an instance all-gather.
    """
    model, efficiency = request.model, request.roofline
    found: list[tuple[float, ...]] = []
    lines: list[list[ExpertLines | None]] = []
    probe_pool = Pool(accelerator, 1, gpus)
    for instances in range(1, most + 1):
        for tp, redundant in product(_tp_choices(model, gpus), request.redundant):
            pool = Pool(accelerator, instances, gpus, tp)
            if not _divides(model, pool) or redundant > spare_experts(model, pool.groups):
                continue
            routing = Routing(redundant=redundant)
            shape = shape_of(request, probe_pool, pool, 1, 1, wire=wire, routing=routing)
            shape, uneven = replace(shape, draft=0), replace(routing, imbalance=2.0)
            use = ffn_memory(model, shape, efficiency)
            if not use.fits:
                continue
            found.append((instances, tp, redundant, use.weights))
            lines.append(
                [
                    ExpertLines.of(
                        group.ffn,
                        ffn_stage(group.ffn, shape, efficiency),
                        ffn_stage(group.ffn, replace(shape, rows=2), efficiency),
                        ffn_stage(group.ffn, replace(shape, routing=uneven), efficiency),
                    )
                    if remote(model, group)
                    else None
                    for group in model.groups
                ]
            )
    if not found:
        return None
    columns = [
        None if column[0] is None else stack([line for line in column if line is not None])
        for column in zip(*lines, strict=True)
    ]
    instances_of, tp_of, redundant_of, weights_of = np.array(found, dtype=np.float64).T
    return FfnPools(
        accelerator, gpus, instances_of, tp_of, redundant_of, weights_of, tuple(columns)
    )


def spare_experts(model: ModelSpec, groups: int) -> int:
    """Returns the most copies that each of ``groups`` expert groups can hold.

    These are the experts that it does not own; a single group needs no copy.
    """
    experts = [g.ffn.experts for g in model.groups if isinstance(g.ffn, MoeFfn)]
    return min((count - math.ceil(count / groups) for count in experts), default=0)


def _tp_choices(model: ModelSpec, gpus: int) -> tuple[int, ...]:
    widths = [g.ffn.intermediate for g in model.groups if remote(model, g)]
    divisors = [tp for tp in (1, 2, 4, 8, 16, 32, 64) if gpus % tp == 0]
    return tuple(tp for tp in divisors if tp == 1 or min(widths) // tp >= NARROWEST)


def _divides(model: ModelSpec, pool: Pool) -> bool:
    experts = [g.ffn.experts for g in model.groups if isinstance(g.ffn, MoeFfn)]
    if experts:
        return pool.groups <= min(experts)
    return pool.groups == 1  # a dense FFN runs under TP within one instance
