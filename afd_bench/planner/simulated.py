"""Simulates the plans with the largest predicted gains, with jitter and a failing instance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afd_bench.planner.map import MODELS, POOLS, MapCell, largest
from afd_planner.cost.shape import calibrated
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import load_model
from afd_planner.report.simulation import VARIATION, simulation_data
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import parse_spec
from afd_planner.sizing.context import fixed
from afd_planner.sizing.plan import OperatingPoint
from afd_planner.sizing.request import Request
from afd_planner.sizing.search import Search, afd_operating

GPUS = "h200"
BACK_S = 3.0
"""Seconds until a failed FFN instance is back; assumed."""


@dataclass(frozen=True)
class Simulated:
    """One simulated plan: seconds of a step.

    planned: by the formula. calm: simulated. noisy: median with jitter. stall: seconds that all
    requests wait if an FFN instance fails and is back after BACK_S.
    """

    cell: MapCell
    planned: float
    calm: float
    noisy: float
    stall: float


def plan_of(cell: MapCell) -> tuple[OperatingPoint, Request]:
    """Returns the xAyF plan of a cell of the map, and its request."""
    attention, ffn = (load_accelerator(name) for name in POOLS[cell.pools])
    request = Request(
        load_model(cell.model),
        (attention,),
        (ffn,),
        fixed(cell.context_k * 1024),
        cell.tpot_ms / 1e3,
        cell.gpus,
        efficiency=calibrated((attention, ffn)),
    )
    search = Search(request)
    best = search.best_afd(search.limits)
    assert best is not None
    return afd_operating(best)[0], request


def simulated(cells: Sequence[MapCell]) -> Iterator[Simulated]:
    """Yields the plan with the largest predicted gain of each model on H200."""
    for model in MODELS:
        cell = largest(cells, model, GPUS)
        if cell is None:
            continue
        point, request = plan_of(cell)
        data = simulation_data(point, request)
        calm = simulate(parse_spec({**data, "jitter": {}}, model))
        noisy = simulate(parse_spec(data, model))
        failure = {"ffn": 0, "at_s": 10 * calm.step.p50, "back_after_s": BACK_S}
        failed = simulate(parse_spec({**data, "failures": [failure]}, model))
        yield Simulated(
            cell, point.step_s, calm.step.p50, noisy.step.p50, failed.failures[0].stall_s
        )


def simulated_lines(found: Sequence[Simulated]) -> list[str]:
    """Returns the section of the page."""
    lines = [
        "\n## Simulated\n",
        f"The plans with the largest gains on H200 in `afd simulate` (`afd plan --simulate`), with"
        f" {100 * VARIATION:.0f} %",
        "log-normal jitter on every stage and link (assumed), and with an FFN instance that is back"
        f" after {BACK_S:g} s.",
        "Colocated plans are not simulated.\n",
        "| plan | planned step, ms | simulated | with jitter | stall of a failure, s |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        cell = each.cell
        lines.append(
            f"| {cell.model}, {cell.plan}, {cell.context_k}K | {each.planned * 1e3:.1f} |"
            f" {each.calm * 1e3:.1f} | {each.noisy * 1e3:.1f} | {each.stall:.2f} |"
        )
    return lines
