"""The plan as text: a table and the assumptions."""

from __future__ import annotations

from collections.abc import Callable

from afd.placement.dispatch import instances_per_row
from afd.topology import expert_ranges
from afd_planner.cost.kernels import measured_kernels
from afd_planner.cost.shape import AfdShape, ColocatedShape
from afd_planner.facts.ffn import MoeFfn
from afd_planner.report.verdict_text import verdict_lines
from afd_planner.sizing.plan import OperatingPoint, Plan
from afd_planner.sizing.request import Request
from afd_planner.sizing.unit_cost import STAGES

MOST_NOTES = 3
"""Largest number of notes on measured times to print."""


def render(plan: Plan) -> str:
    """Returns the whole plan as text for a terminal."""
    rows = table_rows(plan)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [headline(plan.request), ""]
    for row in rows:
        lines.append("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    lines += ["", *verdict_lines(plan), "", *assumption_lines(plan)]
    return "\n".join(lines)


def headline(request: Request) -> str:
    """Returns, for example, ``Step-3 on h800, 4096 tokens, TPOT <= 50 ms, up to 64 GPUs``."""
    attention = "/".join(a.name for a in request.attention)
    ffn = "/".join(a.name for a in request.ffn)
    where = attention if attention == ffn else f"{attention} (attention) and {ffn} (FFN)"
    text = f"{request.model.title} on {where}, {request.context},"
    text += f" TPOT <= {request.tpot_s * 1e3:g} ms"
    if request.gpus is not None:
        text += f", up to {request.gpus} GPUs"
    if request.tokens_per_s is not None:
        text += f", target {request.tokens_per_s:g} tokens/s"
    if request.positions > 1:
        text += f", {request.accepted:g} of {request.positions} tokens accepted per step"
    return text


def unit_text(point: OperatingPoint) -> str:
    """Returns, for example, ``2A2F, instances of 8 h800``; for a colocated plan ``16 h800``."""
    shape = point.shape
    if isinstance(shape, ColocatedShape):
        return f"{shape.gpus} {shape.accelerator.name}"
    name = f"{shape.attention.instances}A{shape.ffn.instances}F"
    first, second = shape.attention, shape.ffn
    if (first.accelerator.name, first.gpus) == (second.accelerator.name, second.gpus):
        size = "of 1" if first.gpus == 1 else f"of {first.gpus}"
        return f"{name}, instances {size} {first.accelerator.name}"
    return (
        f"{name}, A of {first.gpus} {first.accelerator.name},"
        f" F of {second.gpus} {second.accelerator.name}"
    )


def parallelism_text(point: OperatingPoint) -> str:
    """Returns, for example, ``attention DP8 x TP8, FFN EP16``."""
    shape = point.shape
    if isinstance(shape, ColocatedShape):
        experts = f"EP{shape.ep}" + (
            f" x TP{shape.gpus // shape.ep}" if shape.gpus > shape.ep else ""
        )
        attention = f"DP{shape.dp}" + (f" x TP{shape.tp}" if shape.tp > 1 else "")
        return f"attention {attention}, FFN {experts}{_copies_text(shape)}"
    experts = f"EP{shape.ffn.groups}" + (f" x TP{shape.ffn.tp}" if shape.ffn.tp > 1 else "")
    attention = f"DP{shape.attention.groups}" + (
        f" x TP{shape.attention.tp}" if shape.attention.tp > 1 else ""
    )
    return f"attention {attention}, FFN {experts}{_copies_text(shape)}"


def _copies_text(shape: AfdShape | ColocatedShape) -> str:
    return f" +{shape.routing.redundant}" if shape.routing.redundant else ""


def others_text(point: OperatingPoint) -> str:
    """Returns, for example, ``1 x 8 h200 colocated``: what runs on GPUs that no copy fits into."""
    return " + ".join(f"{other.copies} x {_short_unit(other)}" for other in point.others) or "-"


def _short_unit(point: OperatingPoint) -> str:
    shape = point.shape
    if isinstance(shape, ColocatedShape):
        return f"{shape.gpus} {shape.accelerator.name} colocated"
    return f"{shape.attention.instances}A{shape.ffn.instances}F ({shape.total_gpus})"


def table_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Returns the table: (label, disaggregated, colocated), with a header row."""
    rows = [("", "disaggregated", "colocated")]

    def each(label: str, text: Callable[[OperatingPoint], str]) -> None:
        disaggregated, colocated = (text(p) if p else "-" for p in (plan.afd, plan.colocated))
        rows.append((label, disaggregated, colocated))

    each("unit", unit_text)
    each("copies (GPUs)", lambda p: f"{p.copies} ({p.gpus - sum(o.gpus for o in p.others)})")
    if any(p is not None and p.others for p in (plan.afd, plan.colocated)):
        each("other GPUs", others_text)
    each("split", parallelism_text)
    each("pipeline", _pipeline)
    each("rows per micro-batch", lambda p: f"{_micro_rows(p):.0f}")
    each("TPOT", lambda p: f"{p.tpot_s * 1e3:.1f} ms")
    each("tokens/s", lambda p: f"{p.tokens_per_s:,.0f}")
    each("tokens/s/GPU", lambda p: f"{p.per_gpu:,.0f}")
    each("USD per 1M tokens", lambda p: f"{p.usd_per_million:.3f}")
    each("bound by", lambda p: p.binding.value)
    return rows


def _pipeline(point: OperatingPoint) -> str:
    shape = point.shape
    if isinstance(shape, AfdShape):
        return f"depth {shape.depth}, {shape.precision.wire} wire"
    return "2 micro-batches" if shape.overlap else "1 micro-batch"


def _micro_rows(point: OperatingPoint) -> float:
    shape = point.shape
    if isinstance(shape, AfdShape):
        return shape.rows
    return shape.rows / (2 if shape.overlap else 1)


def dispatch_lines(shape: AfdShape | ColocatedShape, request: Request) -> list[str]:
    """Returns the assumed dispatch of rows to experts, if there is more than one expert group."""
    ffns = [group.ffn for group in request.model.groups if isinstance(group.ffn, MoeFfn)]
    if not isinstance(shape, AfdShape) or shape.ffn.groups == 1 or not ffns:
        return []
    experts, top_k, groups = ffns[0].experts, ffns[0].top_k, shape.ffn.groups
    held = [end - start for start, end in expert_ranges(experts, groups)]
    share = instances_per_row(held, top_k) / groups
    return [
        "dispatch: broadcast; routed dispatch would send"
        f" {100 * share:.0f} % of the bytes to {groups} expert groups"
    ]


def assumption_lines(plan: Plan) -> list[str]:
    """Returns which times are measured or modelled, and the assumptions."""
    request = plan.request
    measured = plan.afd.measured if plan.afd else ()
    modelled = [stage for stage in STAGES if stage not in measured]
    lines = []
    if measured:
        about = request.measured.about if request.measured else {}
        source = about.get("machine", "machine not stated")
        lines.append(f"measured: {', '.join(measured)} ({source}), in both plans")
        notes = request.measured.notes if request.measured else ()
        lines += [f"note: {note}" for note in notes[:MOST_NOTES]]
        if len(notes) > MOST_NOTES:
            lines.append(f"note: {len(notes) - MOST_NOTES} more notes of this kind")
    if measured:
        modelled.append("all-to-all of the colocated plan")
    lines.append(f"modelled: {', '.join(modelled)} (data sheets and fitted efficiencies)")
    p = request.precision
    for gpu in dict.fromkeys(a.name for a in (*request.attention, *request.ffn)):
        e = request.efficiency
        kernels = measured_kernels(gpu, request.model, p, e.equal_lengths) if e.kernels else ()
        if kernels:
            lines.append(f"of these, kernels measured on {gpu}: {', '.join(kernels)}")
    lines.append(
        f"formats: FFN {p.ffn_weights}, attention {p.attention_weights}, KV {p.kv};"
        f" expert load: {request.spread.name} (spread {request.spread.spread:.2f})"
    )
    if plan.afd is not None:
        lines += dispatch_lines(plan.afd.shape, request)
    if any(p and p.shape.routing.redundant for p in (plan.afd, plan.colocated)):
        lines.append("FFN +1: each expert group also holds a copy of one popular expert per layer")
    return lines
