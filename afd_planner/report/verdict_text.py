"""The verdict as text: the decision, its reasons, and what would decide or change it."""

from __future__ import annotations

import math

from afd_planner.cost.shape import AfdShape, ColocatedShape
from afd_planner.facts.ffn import MoeFfn
from afd_planner.sizing.error import Decision
from afd_planner.sizing.plan import (
    Change,
    ChangeKind,
    OperatingPoint,
    Plan,
    Reason,
    ReasonKind,
)


def verdict_lines(plan: Plan) -> list[str]:
    """Returns the verdict: a sentence, its reasons, and the requests for which it changes."""
    verdict = plan.verdict
    if plan.colocated is None:
        if verdict.not_served:
            return [
                "No colocated plan fits, and afd serve does not run "
                + " and ".join(verdict.not_served)
                + "."
            ]
        return ["Disaggregate: no colocated plan fits these accelerators and meets the TPOT."]
    lines = [_decision(plan)]
    if plan.afd is not None and len(verdict.routed) > 1:
        loads = ", ".join(f"{each.name} {each.ratio:.2f}" for each in verdict.routed)
        lines.append(f"By expert load: {loads}.")
    if verdict.disaggregate:
        return lines
    if verdict.decision is Decision.UNDECIDED:
        lines += measurement_lines(plan)
        lines.append("Costs of disaggregation:")
    else:
        lines.append("Reasons:")
    lines += [f"  - {reason_text(reason)}" for reason in verdict.reasons]
    if verdict.changes:
        changes = "; ".join(change_text(c) for c in verdict.changes)
        lines.append(f"Disaggregation would win {changes}.")
    elif not verdict.not_served and not plan.request.layouts:
        lines.append(
            "No larger budget up to 256 GPUs, longer context or other TPOT that was tried is a"
            " certain win."
        )
    return lines


def _decision(plan: Plan) -> str:
    verdict = plan.verdict
    if plan.afd is None:
        return "Do NOT disaggregate: there is no xAyF plan."
    measure = "tokens per USD" if plan.request.objective == "cost" else "tokens/s"
    lowest, highest = verdict.error.within(verdict.ratio)
    told = (
        f"{verdict.ratio:.2f} times the {measure} of the best colocated plan, {lowest:.2f} to"
        f" {highest:.2f} with the model's error ({verdict.error.basis})."
    )
    word = {
        Decision.DISAGGREGATE: "Disaggregate",
        Decision.COLOCATED: "Do NOT disaggregate",
        Decision.UNDECIDED: "Undecided",
    }[verdict.decision]
    return f"{word}: {told}"


def measurement_lines(plan: Plan) -> list[str]:
    """Returns what to measure to decide: the stages of the xAyF plan, and the colocated plan."""
    if plan.afd is None or plan.colocated is None:
        return []
    request = plan.request
    shape, other = plan.afd.shape, plan.colocated.shape
    assert isinstance(shape, AfdShape) and isinstance(other, ColocatedShape)
    moe = next((g.ffn for g in request.model.groups if isinstance(g.ffn, MoeFfn)), None)
    held = math.ceil(moe.experts / shape.ffn.groups) if moe else 0
    rows = shape.rows / shape.attention.groups
    lines = [
        "To decide, measure (afd bench stages, then --measured FILE):",
        f"  - attention of one layer: {rows:.0f} rows of {shape.context:.0f} tokens on one GPU",
        f"  - experts of one layer: {held} experts on one GPU, {shape.rows:.0f} rows in all",
        f"  - colocated vLLM, {_colocated(plan.colocated)}: the time of a step with"
        f" {other.rows:.0f} requests",
    ]
    if plan.verdict.reasons:
        kind = plan.verdict.reasons[0].kind.value
        lines.append(f"The largest cost, and so the largest lever, is: {kind}.")
    return lines


def _colocated(point: OperatingPoint) -> str:
    shape = point.shape
    assert isinstance(shape, ColocatedShape)
    return f"{shape.gpus} GPUs, DP{shape.dp} TP{shape.tp} EP{shape.ep}"


def reason_text(reason: Reason) -> str:
    """Returns one reason as a sentence with its numbers."""
    value, limit = reason.value, reason.limit
    text = {
        ReasonKind.DENSE_MODEL: "dense model: without experts, pooling rows saves no weight reads;"
        " afd serve does not disaggregate dense models",
        ReasonKind.TOO_FEW_GPUS: f"too few GPUs: {value:.0f}; disaggregation wins with {limit:.0f}",
        ReasonKind.DEAD_ZONE: f"dead zone: {value:.0f} rows per micro-batch"
        + (f", compute-bound from {limit:.0f}" if value < limit else "")
        + "; every micro-batch reads the expert weights again",
        ReasonKind.SPARSITY_FLOOR: f"sparsity floor: a row uses {value:.3f} of the FFN weights;"
        f" below {limit:.3f} the network cannot keep these GPUs compute-bound",
        ReasonKind.NETWORK: f"network: the wire takes {value:.0f} us per layer; a slot has"
        f" {limit:.0f} us",
        ReasonKind.KV_CAPACITY: f"KV capacity: an attention GPU holds {value:.0f} rows;"
        f" {limit:.0f} would meet the TPOT",
        ReasonKind.EXPERT_IMBALANCE: f"expert imbalance: the busiest expert group gets {value:.2f}"
        " times the mean",
        ReasonKind.FIXED_TIMES: f"fixed times: launches and latency take {value:.0f} us of the"
        f" {limit:.0f} us per layer",
        ReasonKind.DOES_NOT_FIT: f"no xAyF unit fits into {value:.0f} GPUs"
        + (f"; the smallest has {limit:.0f}" if math.isfinite(limit) else ""),
        ReasonKind.SLO: f"no xAyF unit reaches {value:g} ms between tokens",
        ReasonKind.NOT_SERVED: f"not served: afd serve does not run {reason.unit}",
        ReasonKind.NO_ADVANTAGE: "no advantage: both plans do the same work; no single cost of"
        " disaggregation explains the difference",
    }[reason.kind]
    return text + (f" (without it: {reason.gain:.2f}x)" if 1 < reason.gain < math.inf else "")


def change_text(change: Change) -> str:
    """Returns, for example, ``with 96 GPUs (1.40x)``."""
    place = {
        ChangeKind.GPUS: f"with {change.value:.0f} GPUs",
        ChangeKind.CONTEXT: f"at contexts of {change.value:.0f} tokens",
        ChangeKind.TPOT: f"at a TPOT of {change.value:g} ms",
    }[change.kind]
    return f"{place} ({change.ratio:.2f}x)"
