"""``make_plan``: one request in, one plan out, or one sentence why there is none."""

from __future__ import annotations

import math
from dataclasses import replace

from afd.errors import ConfigError
from afd.planner.sizing.plan import ParetoPoint, Plan
from afd.planner.sizing.request import MAX_UNIT_GPUS, Request
from afd.planner.sizing.search import Limits, Spaces, afd_operating, colocated_operating
from afd.planner.sizing.verdict import TPOT_STEPS_S, judge


def make_plan(request: Request) -> Plan:
    """The best xAyF plan, the best colocated one, and which to take.

    Raises:
        ConfigError: nothing holds the model within the budget, or nothing meets the service level;
            the sentence names the nearest that would.
    """
    spaces = Spaces(request)
    found = spaces.best_afd(spaces.limits)
    other = spaces.best_colocated(spaces.limits)
    if found is None and other is None:
        raise ConfigError(_impossible(spaces))
    afd = (found, *afd_operating(found)) if found else None
    return Plan(
        request=request,
        afd=afd[1] if afd else None,
        stages=afd[2] if afd else None,
        colocated=colocated_operating(other) if other else None,
        verdict=judge(spaces, afd, other),
        pareto=_pareto(spaces),
    )


def _pareto(spaces: Spaces) -> tuple[ParetoPoint, ...]:
    request = spaces.request
    points = []
    for tpot in sorted({*TPOT_STEPS_S, request.tpot_s}):
        limits = Limits(tpot, request.gpus)
        afd, colocated = spaces.best_afd(limits), spaces.best_colocated(limits)
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


def _impossible(spaces: Spaces) -> str:
    request = spaces.request
    title = request.model.title
    kinds = {a.name: a for a in (*request.attention, *request.ffn)}
    on = f"{'/'.join(name.upper() for name in kinds)} GPUs"
    sizes = [spaces.smallest(disaggregated=value) for value in (True, False)]
    smallest = min((size for size in sizes if size is not None), default=None)
    if smallest is None:
        return (
            f"{title} with {request.context} does not fit {MAX_UNIT_GPUS} {on} in the precision"
            " asked for; take accelerators with more memory, or narrower weights (--precision)"
        )
    if request.gpus is not None and smallest > request.gpus:
        return (
            f"{title} with {request.context} does not fit {request.gpus} {on}; it needs at least"
            f" {smallest}: give --gpus {smallest}"
        )
    fastest = spaces.fastest_tpot(request.gpus)
    if math.isinf(fastest):
        more = Spaces(replace(request, gpus=None)).fastest_tpot(None)
        return f"{title} holds no request on {request.gpus} {on}; its fastest TPOT is {more:g} s"
    milliseconds = math.ceil(fastest * 1e4) / 10
    return (
        f"no plan for {title} on {on} reaches a TPOT of {request.tpot_s * 1e3:g} ms with"
        f" {request.context}; the smallest feasible one is {milliseconds:g} ms:"
        f" give --tpot {milliseconds:g}"
    )
