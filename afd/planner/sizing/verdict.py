"""Whether to disaggregate, why not, and what would change it.

Reasons come from taking one cost away at a time (``Relief``) and searching again: what the best
xAyF plan gains is what that cost is worth. Changes come from searching again with more GPUs, longer
contexts or another TPOT.
"""

from __future__ import annotations

import math
from dataclasses import replace

from afd.planner.cost.budget import rows_for_compute_bound, slot_seconds, sparsity_floor
from afd.planner.cost.shape import AfdShape
from afd.planner.cost.stages import AfdStages
from afd.planner.facts.ffn import MoeFfn
from afd.planner.sizing.plan import Change, ChangeKind, Operating, Reason, ReasonKind, Verdict
from afd.planner.sizing.request import MAX_UNIT_GPUS, Request
from afd.planner.sizing.search import Best, Limits, Spaces
from afd.planner.sizing.space import Block, Relief

NEEDED = 1.05
"""Ratio from which disaggregation is worth its second pool: five percent, below which the model's
own error decides."""

DOUBTFUL = 1.2
"""Ratio up to which a gain may be the model's: where it was checked, on H200, it favoured the split
by up to 19 % (docs/planner-model.md)."""

NOTICEABLE = 1.02
"""A cost whose removal gains less is no reason."""

GPU_STEPS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TPOT_STEPS_S = (0.010, 0.015, 0.020, 0.025, 0.030, 0.040, 0.050, 0.075, 0.100, 0.150, 0.200)
CONTEXT_FACTORS = (2, 4, 8, 16, 32)
LONGEST_CONTEXT = 131072


def judge(
    spaces: Spaces,
    afd: tuple[Best, Operating, AfdStages] | None,
    colocated: Best | None,
) -> Verdict:
    """The verdict for one request; ``afd`` or ``colocated`` may be None, not both."""
    request = spaces.request
    if colocated is None:
        return Verdict(True, math.inf, NEEDED, (), ())
    ratio = afd[0].score / colocated.score if afd else 0.0
    dense = not request.model.moe_layers
    if ratio >= NEEDED and not dense:
        return Verdict(True, ratio, NEEDED, (), ())
    reasons = _reasons(spaces, *afd) if afd else [_absent(spaces)]
    changes = [] if dense else _changes(spaces)
    more = next((c for c in changes if c.kind is ChangeKind.GPUS), None)
    if more is not None and request.gpus is not None:
        gain = more.ratio / ratio if ratio else math.inf
        few = Reason(ReasonKind.TOO_FEW_GPUS, request.gpus, more.value, "GPUs", gain)
        reasons = [few, *reasons]
    reasons.sort(key=lambda reason: -reason.gain)
    if dense:
        reasons = [Reason(ReasonKind.DENSE_MODEL, 0, 1, "mixture-of-experts layers"), *reasons]
    if not reasons:
        reasons = [Reason(ReasonKind.NO_ADVANTAGE, ratio, NEEDED, "times colocated")]
    return Verdict(False, ratio, NEEDED, tuple(reasons), tuple(changes))


def _absent(spaces: Spaces) -> Reason:
    request = spaces.request
    smallest = spaces.smallest(disaggregated=True)
    if smallest is None or (request.gpus is not None and smallest > request.gpus):
        limit = smallest or math.inf
        return Reason(ReasonKind.DOES_NOT_FIT, request.gpus or MAX_UNIT_GPUS, limit, "GPUs")
    return Reason(ReasonKind.SLO, request.tpot_s * 1e3, math.inf, "ms")


def _reasons(spaces: Spaces, best: Best, point: Operating, stages: AfdStages) -> list[Reason]:
    assert isinstance(point.shape, AfdShape)
    request, shape = spaces.request, point.shape
    found = []
    for relief, reason in (
        (Relief(rereads=True), _dead_zone(request, shape)),
        (Relief(network=True), _network(request, shape, stages)),
        (Relief(kv=True), Reason(ReasonKind.KV_CAPACITY, _rows_per_gpu(best), 0, "rows per GPU")),
        (Relief(imbalance=True), _imbalance(shape)),
        (Relief(overheads=True), _fixed_times(request, shape, stages)),
    ):
        relieved = spaces.best_afd(spaces.limits, relief)
        gain = relieved.score / best.score if relieved else 1.0
        if relieved is None or gain < NOTICEABLE:
            continue
        if relief.kv:
            reason = replace(reason, limit=_rows_per_gpu(relieved))
        found.append(replace(reason, gain=gain))
    return found


def _moe(request: Request) -> MoeFfn | None:
    return next((g.ffn for g in request.model.groups if isinstance(g.ffn, MoeFfn)), None)


def _dead_zone(request: Request, shape: AfdShape) -> Reason:
    """Rows of a micro-batch against B_MoE, from which the FFN is compute-bound."""
    sparsity = min((g.ffn.sparsity for g in request.model.groups), default=1.0)
    needed = rows_for_compute_bound(shape.ffn.accelerator, request.precision.ffn_weights, sparsity)
    return Reason(ReasonKind.DEAD_ZONE, shape.rows, needed, "rows per micro-batch")


def _network(request: Request, shape: AfdShape, stages: AfdStages) -> Reason:
    """The sparsity floor where the model is below it, else the time on the wire."""
    moe, accelerator = _moe(request), shape.ffn.accelerator
    if moe is not None:
        floor = sparsity_floor(
            accelerator.math_flops(request.precision.ffn_weights),
            accelerator.memory_bandwidth,
            accelerator.nic_bandwidth * shape.ffn.gpus * request.efficiency.network,
            request.model.hidden,
            request.model.num_layers,
            request.tpot_s * request.accepted / 3,
        )
        if moe.sparsity < floor:
            return Reason(ReasonKind.SPARSITY_FLOOR, moe.sparsity, floor, "share of experts used")
    wire = max(group.to_ffn + group.to_attention for group in stages.groups)
    slot = _slot(request, shape, stages)
    return Reason(ReasonKind.NETWORK, wire * 1e6, slot * 1e6, "us per layer")


def _rows_per_gpu(best: Best) -> float:
    """Sequences in flight per attention GPU."""
    block, i = best.block, best.index
    assert isinstance(block, Block)
    return best.rows * float(block.depth[i]) / block.attention.tp


def _imbalance(shape: AfdShape) -> Reason:
    return Reason(
        ReasonKind.EXPERT_IMBALANCE, shape.routing.imbalance, 1.0, "times the mean expert load"
    )


def _fixed_times(request: Request, shape: AfdShape, stages: AfdStages) -> Reason:
    """Launches, synchronisation and latency once around a layer, against its share of the TPOT."""
    efficiency = request.efficiency
    around = (
        efficiency.attention_overhead_s + efficiency.ffn_overhead_s + 2 * efficiency.wire_latency_s
    )
    whole = _slot(request, shape, stages) * shape.depth
    return Reason(ReasonKind.FIXED_TIMES, around * 1e6, whole * 1e6, "us per layer")


def _slot(request: Request, shape: AfdShape, stages: AfdStages) -> float:
    layers = request.model.num_layers
    return slot_seconds(request.tpot_s, request.accepted, stages.rest_s, layers, shape.depth)


# -- what would change it


def _changes(spaces: Spaces) -> list[Change]:
    found = [_more_gpus(spaces), _longer_context(spaces), _other_tpot(spaces)]
    return [change for change in found if change is not None]


def ratio_at(spaces: Spaces, limits: Limits) -> float:
    """xAyF over colocated within ``limits``; 0 where there is no xAyF plan, inf where only that."""
    afd, colocated = spaces.best_afd(limits), spaces.best_colocated(limits)
    if afd is None:
        return 0.0
    return afd.score / colocated.score if colocated else math.inf


def _more_gpus(spaces: Spaces) -> Change | None:
    """The budget from which on disaggregation wins, all larger ones included."""
    request = spaces.request
    if request.gpus is None:
        return None
    steps = [n for n in GPU_STEPS if n > request.gpus]
    ratios = [ratio_at(spaces, replace(spaces.limits, gpus=n)) for n in steps]
    first = None
    for index in range(len(steps) - 1, -1, -1):
        if ratios[index] < NEEDED:
            break
        first = index
    return None if first is None else Change(ChangeKind.GPUS, steps[first], ratios[first])


def _longer_context(spaces: Spaces) -> Change | None:
    """The first longer context, doubling, at which disaggregation wins."""
    request = spaces.request
    longest = min(request.model.max_context or LONGEST_CONTEXT, LONGEST_CONTEXT)
    for factor in CONTEXT_FACTORS:
        context = request.context.scaled(factor)
        if context.longest > longest:
            return None
        longer = spaces.at_context(context)
        ratio = ratio_at(longer, longer.limits)
        if NEEDED <= ratio < math.inf:
            return Change(ChangeKind.CONTEXT, context.mean, ratio)
    return None


def _other_tpot(spaces: Spaces) -> Change | None:
    """The TPOT nearest to the one asked for (as a factor) at which disaggregation wins."""
    asked = spaces.request.tpot_s
    for tpot in sorted(TPOT_STEPS_S, key=lambda value: abs(math.log(value / asked))):
        if math.isclose(tpot, asked):
            continue
        ratio = ratio_at(spaces, replace(spaces.limits, tpot_s=tpot))
        if NEEDED <= ratio < math.inf:
            return Change(ChangeKind.TPOT, tpot * 1e3, ratio)
    return None
