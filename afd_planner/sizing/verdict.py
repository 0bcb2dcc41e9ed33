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
from afd_planner.sizing.error import Decision, ErrorBand, error_of
from afd_planner.sizing.imbalance import EQUAL_SPREAD
from afd_planner.sizing.plan import (
    Change,
    ChangeKind,
    OperatingPoint,
    Reason,
    ReasonKind,
    Routed,
    Verdict,
)
from afd_planner.sizing.request import MAX_UNIT_GPUS, Request
from afd_planner.sizing.search import Best, Limits, Search
from afd_planner.sizing.supported import not_served

NOTICEABLE = 1.02
"""Smallest gain for which a cost is listed as a reason."""

GPU_STEPS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TPOT_STEPS_S = (0.010, 0.015, 0.020, 0.025, 0.030, 0.040, 0.050, 0.075, 0.100, 0.150, 0.200)
CONTEXT_FACTORS = (2, 4, 16)
LONGEST_CONTEXT = 131072


def judge(
    search: Search,
    afd: tuple[Best, OperatingPoint, AfdStages] | None,
    colocated: Best | None,
) -> Verdict:
    """Returns the verdict for one request. One of ``afd`` and ``colocated`` may be None."""
    request, error = search.request, error_of(search.request)
    refused = not_served(request)
    ratio = _ratio(afd[0] if afd else None, colocated)
    routed = _routed(search, ratio)
    decision = _decide(error, ratio, routed)
    if refused:
        decision = Decision.COLOCATED if colocated else Decision.UNDECIDED
    if decision is Decision.DISAGGREGATE or colocated is None:
        return Verdict(decision, ratio, error, routed, (), (), refused)
    dense = not request.model.moe_layers
    reasons = _reasons(search, *afd) if afd else [_absent(search)]
    changes = [] if refused or request.layouts else _changes(search, error.high)
    more = next((c for c in changes if c.kind is ChangeKind.GPUS), None)
    if more is not None and request.gpus is not None:
        gain = more.ratio / ratio if ratio else math.inf
        few = Reason(ReasonKind.TOO_FEW_GPUS, request.gpus, more.value, "GPUs", gain)
        reasons = [few, *reasons]
    reasons.sort(key=lambda reason: -reason.gain)
    if dense:
        reasons = [Reason(ReasonKind.DENSE_MODEL, 0, 1, "mixture-of-experts layers"), *reasons]
    if refused and not dense:
        reasons = [Reason(ReasonKind.NOT_SERVED, 0, 0, "; ".join(refused)), *reasons]
    if not reasons:
        reasons = [Reason(ReasonKind.NO_ADVANTAGE, ratio, error.high, "times colocated")]
    return Verdict(decision, ratio, error, routed, tuple(reasons), tuple(changes), refused)


def _ratio(afd: Best | None, colocated: Best | None) -> float:
    if afd is None:
        return 0.0
    return afd.score / colocated.score if colocated else math.inf


def _routed(search: Search, ratio: float) -> tuple[Routed, ...]:
    """Returns the ratio under equal, the requested and the worst popularity of experts.

    Rows choose at random in all of them.
    """
    spread = search.request.spread
    if spread.spread == 0 or not search.request.model.moe_layers:
        return (Routed(spread.name, ratio),)
    found = [Routed(spread.name, ratio)]
    for place, other in ((0, EQUAL_SPREAD), (2, spread.at_worst())):
        again = search.with_spread(other)
        found.insert(place, Routed(other.name, ratio_at(again, again.limits)))
    return tuple(found)


def _decide(error: ErrorBand, ratio: float, routed: tuple[Routed, ...]) -> Decision:
    """Returns the decision for the requested loads, or UNDECIDED if other loads contradict it."""
    decision = error.decide(ratio)
    against = {Decision.DISAGGREGATE: Decision.COLOCATED, Decision.COLOCATED: Decision.DISAGGREGATE}
    others = {error.decide(each.ratio) for each in routed}
    return Decision.UNDECIDED if against.get(decision) in others else decision


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
        next(g.attention.overhead_s for g in stages.groups if g.ffn is not None)
        + efficiency.turn_s
        + efficiency.ffn_overhead_s
        + 2 * efficiency.wire_latency_s
    )
    whole = _slot(request, shape, stages) * shape.depth
    return Reason(ReasonKind.FIXED_TIMES, around * 1e6, whole * 1e6, "us per layer")


def _slot(request: Request, shape: AfdShape, stages: AfdStages) -> float:
    layers = request.model.num_layers
    return slot_seconds(request.tpot_s, request.accepted, stages.rest_s, layers, shape.depth)


# -- changes: requests for which disaggregation wins


def _changes(search: Search, needed: float) -> list[Change]:
    found = [
        _more_gpus(search, needed),
        _longer_context(search, needed),
        _other_tpot(search, needed),
    ]
    return [change for change in found if change is not None]


def ratio_at(search: Search, limits: Limits) -> float:
    """Returns the ratio of xAyF to colocated within ``limits``; see ``Verdict.ratio``."""
    return _ratio(search.best_afd(limits), search.best_colocated(limits))


def _more_gpus(search: Search, needed: float) -> Change | None:
    """Returns the smallest larger budget of GPU_STEPS with which disaggregation wins."""
    request = search.request
    if request.gpus is None:
        return None
    for gpus in (n for n in GPU_STEPS if n > request.gpus):
        ratio = ratio_at(search, replace(search.limits, gpus=gpus))
        if needed <= ratio < math.inf:
            return Change(ChangeKind.GPUS, gpus, ratio)
    return None


def _longer_context(search: Search, needed: float) -> Change | None:
    """Returns the first longer context of CONTEXT_FACTORS at which disaggregation wins."""
    request = search.request
    longest = min(request.model.max_context or LONGEST_CONTEXT, LONGEST_CONTEXT)
    for factor in CONTEXT_FACTORS:
        context = request.context.scaled(factor)
        if context.longest > longest:
            return None
        longer = search.at_context(context)
        ratio = ratio_at(longer, longer.limits)
        if needed <= ratio < math.inf:
            return Change(ChangeKind.CONTEXT, context.mean, ratio)
    return None


def _other_tpot(search: Search, needed: float) -> Change | None:
    """Returns the TPOT closest to the requested one, by ratio, at which disaggregation wins."""
    asked = search.request.tpot_s
    for tpot in sorted(TPOT_STEPS_S, key=lambda value: abs(math.log(value / asked))):
        if math.isclose(tpot, asked):
            continue
        ratio = ratio_at(search, replace(search.limits, tpot_s=tpot))
        if needed <= ratio < math.inf:
            return Change(ChangeKind.TPOT, tpot * 1e3, ratio)
    return None
