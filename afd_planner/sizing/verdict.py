"""Decides whether to disaggregate, and finds reasons against it and requests for which it wins.

Reasons: remove one cost at a time (``Relief``) and search again; the gain of the best xAyF plan is
the weight of that cost. Changes: search again with more GPUs, longer contexts or another TPOT.
"""

from __future__ import annotations

import math
from dataclasses import replace

from afd_planner.cost.budget import rows_for_compute_bound, slot_seconds, sparsity_floor
from afd_planner.cost.shape import AfdShape
from afd_planner.cost.stages import AfdStages
from afd_planner.facts.ffn import MoeFfn
from afd_planner.sizing.afd_units import AfdUnits, Relief
from afd_planner.sizing.plan import Change, ChangeKind, OperatingPoint, Reason, ReasonKind, Verdict
from afd_planner.sizing.request import MAX_UNIT_GPUS, Request
from afd_planner.sizing.search import Best, Limits, Search

NEEDED = 1.05
"""Ratio from which disaggregation is recommended. A smaller gain is within the model's error."""

DOUBTFUL = 1.2
"""Ratio up to which a gain may be a model error: on H200, the model favoured disaggregation by up
to 19 % (docs/planner-model.md)."""

NOTICEABLE = 1.02
"""Smallest gain for which a cost is listed as a reason."""

GPU_STEPS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TPOT_STEPS_S = (0.010, 0.015, 0.020, 0.025, 0.030, 0.040, 0.050, 0.075, 0.100, 0.150, 0.200)
CONTEXT_FACTORS = (2, 4, 8, 16, 32)
LONGEST_CONTEXT = 131072


def judge(
    search: Search,
    afd: tuple[Best, OperatingPoint, AfdStages] | None,
    colocated: Best | None,
) -> Verdict:
    """Returns the verdict for one request. One of ``afd`` and ``colocated`` may be None."""
    request = search.request
    if colocated is None:
        return Verdict(True, math.inf, NEEDED, (), ())
    ratio = afd[0].score / colocated.score if afd else 0.0
    dense = not request.model.moe_layers
    if ratio >= NEEDED and not dense:
        return Verdict(True, ratio, NEEDED, (), ())
    reasons = _reasons(search, *afd) if afd else [_absent(search)]
    changes = [] if dense else _changes(search)
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


def _absent(search: Search) -> Reason:
    request = search.request
    smallest = search.smallest(disaggregated=True)
    if smallest is None or (request.gpus is not None and smallest > request.gpus):
        limit = smallest or math.inf
        return Reason(ReasonKind.DOES_NOT_FIT, request.gpus or MAX_UNIT_GPUS, limit, "GPUs")
    return Reason(ReasonKind.SLO, request.tpot_s * 1e3, math.inf, "ms")


def _reasons(search: Search, best: Best, point: OperatingPoint, stages: AfdStages) -> list[Reason]:
    assert isinstance(point.shape, AfdShape)
    request, shape = search.request, point.shape
    found = []
    for relief, reason in (
        (Relief(rereads=True), _dead_zone(request, shape)),
        (Relief(network=True), _network(request, shape, stages)),
        (Relief(kv=True), Reason(ReasonKind.KV_CAPACITY, _rows_per_gpu(best), 0, "rows per GPU")),
        (Relief(imbalance=True), _imbalance(shape)),
        (Relief(overheads=True), _fixed_times(request, shape, stages)),
    ):
        relieved = search.best_afd(search.limits, relief)
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
    """Compares rows per micro-batch with B_MoE, from which the FFN is compute-bound."""
    sparsity = min((g.ffn.sparsity for g in request.model.groups), default=1.0)
    needed = rows_for_compute_bound(shape.ffn.accelerator, request.precision.ffn_weights, sparsity)
    return Reason(ReasonKind.DEAD_ZONE, shape.rows, needed, "rows per micro-batch")


def _network(request: Request, shape: AfdShape, stages: AfdStages) -> Reason:
    """Returns the sparsity floor if the model is below it, else the time on the wire."""
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
    """Returns the sequences in flight per attention GPU."""
    units, i = best.units, best.index
    assert isinstance(units, AfdUnits)
    return best.rows * float(units.depth[i]) / units.attention.tp


def _imbalance(shape: AfdShape) -> Reason:
    return Reason(
        ReasonKind.EXPERT_IMBALANCE, shape.routing.imbalance, 1.0, "times the mean expert load"
    )


def _fixed_times(request: Request, shape: AfdShape, stages: AfdStages) -> Reason:
    """Compares fixed times of one round trip through a layer with the layer's share of the TPOT."""
    efficiency = request.efficiency
    around = (
        efficiency.attention_overhead_s + efficiency.ffn_overhead_s + 2 * efficiency.wire_latency_s
    )
    whole = _slot(request, shape, stages) * shape.depth
    return Reason(ReasonKind.FIXED_TIMES, around * 1e6, whole * 1e6, "us per layer")


def _slot(request: Request, shape: AfdShape, stages: AfdStages) -> float:
    layers = request.model.num_layers
    return slot_seconds(request.tpot_s, request.accepted, stages.rest_s, layers, shape.depth)


# -- changes: requests for which disaggregation wins


def _changes(search: Search) -> list[Change]:
    found = [_more_gpus(search), _longer_context(search), _other_tpot(search)]
    return [change for change in found if change is not None]


def ratio_at(search: Search, limits: Limits) -> float:
    """Returns the ratio of xAyF to colocated within ``limits``; see ``Verdict.ratio``."""
    afd, colocated = search.best_afd(limits), search.best_colocated(limits)
    if afd is None:
        return 0.0
    return afd.score / colocated.score if colocated else math.inf


def _more_gpus(search: Search) -> Change | None:
    """Returns the smallest budget at and above which disaggregation always wins."""
    request = search.request
    if request.gpus is None:
        return None
    steps = [n for n in GPU_STEPS if n > request.gpus]
    ratios = [ratio_at(search, replace(search.limits, gpus=n)) for n in steps]
    first = None
    for index in range(len(steps) - 1, -1, -1):
        if ratios[index] < NEEDED:
            break
        first = index
    return None if first is None else Change(ChangeKind.GPUS, steps[first], ratios[first])


def _longer_context(search: Search) -> Change | None:
    """Returns the first longer context (doubling) at which disaggregation wins."""
    request = search.request
    longest = min(request.model.max_context or LONGEST_CONTEXT, LONGEST_CONTEXT)
    for factor in CONTEXT_FACTORS:
        context = request.context.scaled(factor)
        if context.longest > longest:
            return None
        longer = search.at_context(context)
        ratio = ratio_at(longer, longer.limits)
        if NEEDED <= ratio < math.inf:
            return Change(ChangeKind.CONTEXT, context.mean, ratio)
    return None


def _other_tpot(search: Search) -> Change | None:
    """Returns the TPOT closest to the requested one, by ratio, at which disaggregation wins."""
    asked = search.request.tpot_s
    for tpot in sorted(TPOT_STEPS_S, key=lambda value: abs(math.log(value / asked))):
        if math.isclose(tpot, asked):
            continue
        ratio = ratio_at(search, replace(search.limits, tpot_s=tpot))
        if NEEDED <= ratio < math.inf:
            return Change(ChangeKind.TPOT, tpot * 1e3, ratio)
    return None
