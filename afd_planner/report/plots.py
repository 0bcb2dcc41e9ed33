"""Three plots of a plan: Pareto, roofline, timeline. Only this module needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable

from afd.errors import ConfigError
from afd_planner.cost.shape import AfdShape
from afd_planner.cost.stages import Part
from afd_planner.report.text import headline
from afd_planner.report.timeline import LANES, timeline
from afd_planner.report.verdict_text import verdict_lines
from afd_planner.sizing.plan import ParetoPoint, Plan

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise ConfigError(
        "--report needs matplotlib, which is not installed; install it with"
        ' pip install "afd[plan]", or omit --report'
    ) from None

AFD, COLOCATED = "#1f6feb", "#d1740a"
MICRO_BATCHES = ("#1f6feb", "#2da44e", "#bf8700")
SALT = "afd-plan"


def pareto(plan: Plan, axes: Axes) -> None:
    """Plots throughput over the TPOT limit, disaggregated and colocated, with the plan's points.

    Throughput is per GPU, or per USD if the request mixes kinds of GPUs.
    """
    request = plan.request
    mixed = len({gpu.name for gpu in (*request.attention, *request.ffn)}) > 1
    for name, color, afd, point in (
        ("disaggregated", AFD, True, plan.afd),
        ("colocated", COLOCATED, False, plan.colocated),
    ):
        points = [(p.tpot_s * 1e3, _rate(p, afd, mixed)) for p in plan.pareto]
        points = [(x, y) for x, y in points if y > 0]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o-", color=color, label=name, markersize=4)
        if point:
            own = 1e6 / point.usd_per_million if mixed else point.per_gpu
            axes.plot([point.tpot_s * 1e3], [own], "*", color=color, markersize=13)
    axes.axvline(request.tpot_s * 1e3, color="grey", linestyle=":", label="requested TPOT")
    rate = "tokens per USD" if mixed else "tokens/s/GPU"
    axes.set(xlabel="TPOT limit (ms)", ylabel=rate, title="Pareto", ylim=(0, None))
    axes.legend(fontsize=8)


def _rate(point: ParetoPoint, afd: bool, per_usd: bool) -> float:
    if per_usd:
        return point.afd_per_usd if afd else point.colocated_per_usd
    return point.afd if afd else point.colocated


def roofline(plan: Plan, axes: Axes) -> None:
    """Plots each part of the planned stages under the data-sheet roofline of its GPU."""
    axes.set(xlabel="FLOPs per byte", ylabel="FLOP/s", title="Roofline", xscale="log", yscale="log")
    if plan.afd is None or plan.stages is None or not isinstance(plan.afd.shape, AfdShape):
        axes.text(0.5, 0.5, "no xAyF plan", ha="center", transform=axes.transAxes)
        return
    shape, precision = plan.afd.shape, plan.request.precision
    efficiency = plan.request.efficiency
    formats = {
        "projections": precision.attention_weights,
        "attention": precision.attention_math,
        "ffn": precision.ffn_weights,
    }
    one_kind = shape.attention.accelerator == shape.ffn.accelerator
    for side, pool, color, parts in (
        ("attention", shape.attention, AFD, _parts(plan, "attention")),
        ("FFN", shape.ffn, COLOCATED, _parts(plan, "ffn")),
    ):
        gpu = pool.accelerator
        peak = gpu.math_flops(precision.ffn_weights)
        xs = [1.0, peak / gpu.memory_bandwidth, 1e5]
        roof = [min(peak, x * gpu.memory_bandwidth) for x in xs]
        if not one_kind:
            axes.plot(xs, roof, color=color, label=f"{gpu.name} ({side})")
        elif side == "FFN":  # both pools share one roofline
            axes.plot(xs, roof, color="grey", label=gpu.name)
        for number, part in enumerate(parts):
            if part.memory_s <= 0 or part.compute_s <= 0:
                continue  # measured: no division into compute and memory
            share = efficiency.attention if part.name == "attention" else efficiency.matmul
            rate = gpu.math_flops(formats.get(part.name, precision.ffn_weights))
            flops = part.compute_s * rate * share
            nbytes = part.memory_s * gpu.memory_bandwidth * efficiency.memory
            place = (flops / nbytes, flops / part.seconds)
            axes.plot(*place, "o", color=color)
            offset = (5, 6) if number % 2 else (5, -11)
            axes.annotate(part.name, place, textcoords="offset points", xytext=offset, fontsize=8)
    axes.legend(fontsize=8, loc="lower right")


def _parts(plan: Plan, stage: str) -> tuple[Part, ...]:
    assert plan.stages is not None
    remote = [group for group in plan.stages.groups if group.ffn is not None]
    if not remote:
        return ()
    group = max(remote, key=lambda g: len(g.layers))
    assert group.ffn is not None
    return group.attention.parts if stage == "attention" else group.ffn.parts


def pipeline(plan: Plan, axes: Axes) -> None:
    """Plots four layers of the planned pipeline, with one colour per micro-batch."""
    axes.set_xlabel("us")
    axes.set_title("Timeline of four layers", loc="left")
    if plan.afd is None or plan.stages is None or not isinstance(plan.afd.shape, AfdShape):
        axes.text(0.5, 0.5, "no xAyF plan", ha="center", transform=axes.transAxes)
        return
    for span in timeline(plan.stages, plan.afd.shape.depth):
        row = len(LANES) - 1 - LANES.index(span.lane)
        axes.barh(
            row,
            (span.end - span.begin) * 1e6,
            left=span.begin * 1e6,
            height=0.7,
            color=MICRO_BATCHES[span.micro_batch % 3],
            alpha=0.55 + 0.15 * (span.layer % 4),
            edgecolor="white",
            linewidth=0.5,
            label=f"micro-batch {span.micro_batch + 1}" if row == 0 and span.layer == 3 else None,
        )
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    axes.set_yticks(range(len(LANES)), reversed(LANES))


PLOTS: tuple[tuple[str, Callable[[Plan, Axes], None]], ...] = (
    ("pareto", pareto),
    ("roofline", roofline),
    ("timeline", pipeline),
)


def svg(plan: Plan, draw: Callable[[Plan, Axes], None]) -> str:
    """Returns one plot as an <svg> element. The same plan gives the same text."""
    with matplotlib.rc_context({"svg.hashsalt": SALT, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        draw(plan, figure.add_subplot())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def png(plan: Plan) -> bytes:
    """Returns all plots as one PNG, titled with the request and the verdict."""
    figure = Figure(figsize=(8, 12), layout="constrained")
    verdict = verdict_lines(plan)[0].removesuffix(" Reasons:")
    figure.suptitle(f"{headline(plan.request)}\n{verdict}", fontsize=10)
    for axes, (_, draw) in zip(figure.subplots(len(PLOTS)), PLOTS, strict=True):
        draw(plan, axes)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()
