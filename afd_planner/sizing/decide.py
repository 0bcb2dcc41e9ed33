"""``make_plan`` turns a request into a plan, or into an error that says why there is none."""

from __future__ import annotations

import math
from dataclasses import replace

from afd.errors import ConfigError
from afd_planner.sizing.layout import Layout
from afd_planner.sizing.plan import ParetoPoint, Plan
from afd_planner.sizing.request import MAX_UNIT_GPUS, Request
from afd_planner.sizing.search import Limits, Search, afd_operating, colocated_operating
from afd_planner.sizing.verdict import TPOT_STEPS_S, judge


def make_plan(request: Request) -> Plan:
    """Returns the best xAyF plan, the best colocated plan, and the verdict.

    Raises:
        ConfigError: No plan fits the budget or meets the TPOT. The message names the nearest budget
            or TPOT that works.
    """
    search = Search(request)
    found = search.best_afd(search.limits)
    other = search.best_colocated(search.limits)
    for layout, best in ((request.afd_layout, found), (request.colocated_layout, other)):
        if layout is not None and best is None:
            raise ConfigError(_layout_impossible(search, layout))
    if found is None and other is None:
        raise ConfigError(_impossible(search))
    afd = (found, *afd_operating(found)) if found else None
    return Plan(
        request=request,
        afd=afd[1] if afd else None,
        stages=afd[2] if afd else None,
        colocated=colocated_operating(other) if other else None,
        verdict=judge(search, afd, other),
        pareto=_pareto(search),
    )


def _layout_impossible(search: Search, layout: Layout) -> str:
    request = search.request
    if request.batch is not None:
        limit = f"memory for {request.batch} sequences"
    else:
        limit = f"a TPOT of {request.tpot_s * 1e3:g} ms"
    budget = f", or does not fit {request.gpus} GPUs" if request.gpus is not None else ""
    return (
        f"--layout {layout.text} does not hold {request.model.title} with {request.context}, or"
        f" lacks {limit}{budget}; try more or larger GPUs, a smaller --batch or a longer --tpot"
    )


def _pareto(search: Search) -> tuple[ParetoPoint, ...]:
    request = search.request
    points = []
    for tpot in sorted({*TPOT_STEPS_S, request.tpot_s}):
        limits = Limits(tpot, request.gpus)
        afd, colocated = search.best_afd(limits), search.best_colocated(limits)
        points.append(
            ParetoPoint(
                tpot,
                afd.per_gpu if afd else 0.0,
                colocated.per_gpu if colocated else 0.0,
                afd.per_usd if afd else 0.0,
                colocated.per_usd if colocated else 0.0,
            )
        )
    return tuple(points)


def _impossible(search: Search) -> str:
    request = search.request
    title = request.model.title
    kinds = {a.name: a for a in (*request.attention, *request.ffn)}
    on = f"{'/'.join(name.upper() for name in kinds)} GPUs"
    sizes = [search.smallest(disaggregated=value) for value in (True, False)]
    smallest = min((size for size in sizes if size is not None), default=None)
    if smallest is None:
        return (
            f"{title} with {request.context} does not fit {MAX_UNIT_GPUS} {on} in this precision;"
            " use accelerators with more memory, or smaller weights (--precision)"
        )
    if request.gpus is not None and smallest > request.gpus:
        return (
            f"{title} with {request.context} does not fit {request.gpus} {on}; it needs at least"
            f" {smallest}: give --gpus {smallest}"
        )
    fastest = search.fastest_tpot(request.gpus)
    if math.isinf(fastest):
        more = Search(replace(request, gpus=None)).fastest_tpot(None)
        return (
            f"{request.gpus} {on} cannot hold a request of {title}; with more GPUs the fastest TPOT"
            f" is {more:g} s"
        )
    milliseconds = math.ceil(fastest * 1e4) / 10
    return (
        f"no plan for {title} on {on} reaches a TPOT of {request.tpot_s * 1e3:g} ms with"
        f" {request.context}; the smallest feasible one is {milliseconds:g} ms:"
        f" give --tpot {milliseconds:g}"
    )
