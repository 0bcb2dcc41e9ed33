"""Simulates plans of the planner's map under conditions that its formulas leave out.

Per model, the plan with the largest predicted gain on H200 (docs/results/planner_map.csv), with
jitter, uneven experts, Poisson arrivals, prompts in the decode instances, and failures. The stage
times are the planner's, so this shows what the conditions change, not whether the times are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from afd_bench.planner.map import MapCell
from afd_bench.planner.simulated import plan_of
from afd_planner.cost.shape import AfdShape
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.files import NATURAL_LOADS
from afd_planner.report.simulation import simulation_data
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.result import Result
from afd_planner.simulate.spec import parse_spec
from afd_planner.sizing.imbalance import EVEN_SPREAD
from afd_planner.sizing.plan import OperatingPoint
from afd_planner.sizing.request import Request

GPUS = "h200"
MODELS = ("deepseek-v3", "kimi-k2", "qwen3-235b-a22b", "step-3")
LOAD = 0.95
"""Arriving requests over those that the planned batch answers at the planned step time."""
PROMPTS_LOAD = 0.8
"""The same for requests whose prompts run in the decode instances, of ``sustained_per_s``."""
OUTPUT = 256
SPREAD = 0.5
"""Coefficient of variation of prompts, and relative half range of answers; assumed."""
STEPS = 800
"""Requests arrive during this many planned steps; the second half is measured."""
FAILS_AT = 450
"""Planned step at which an instance fails."""
FFN_BACK_S, ATTENTION_BACK_S, DETECT_S = 3.0, 15.0, 0.05
"""Assumed; docs/results/faults.json has those of small deployments."""
CHUNK = 2048
"""Prompt tokens per step and attention instance, beside the decode rows."""


@dataclass(frozen=True)
class PointCase:
    """One simulated condition of a plan. ``planned_s``: the planner's step, seconds."""

    cell: MapCell
    condition: str
    planned_s: float
    planned_per_gpu: float
    result: Result

    @property
    def share(self) -> float:
        """Tokens/s over the planned ones."""
        return self.result.tokens_per_s_per_gpu / self.planned_per_gpu

    @property
    def tpot_s(self) -> float:
        """Median time per token: of requests, or of tokens where the load is constant."""
        return self.result.tpot.p50 or self.result.itl.p50


def conditions(point: OperatingPoint, request: Request) -> Mapping[str, dict[str, Any]]:
    """Returns the simulation of every condition, as the contents of a file."""
    shape = point.shape
    assert isinstance(shape, AfdShape)
    base = simulation_data(point, request)
    even = simulation_data(point, replace(request, spread=EVEN_SPREAD))
    moe = next(g.ffn for g in request.model.groups if isinstance(g.ffn, MoeFfn))
    routing = {
        "routing": str(NATURAL_LOADS),
        "text": "chat",
        "ranks": shape.ffn.gpus // shape.ffn.tp,
        "experts": moe.experts,
        "top_k": moe.top_k,
    }
    requests = _requests(point, shape, LOAD * shape.batch / (OUTPUT * point.step_s))
    served = {**base, "constant": None, "requests": requests, "detect_s": DETECT_S}
    with_prompts = {
        **_requests(point, shape, PROMPTS_LOAD * sustained_per_s(base, shape, point.step_s)),
        "prefill": "here",
        "max_tokens": base["constant"]["rows"] + CHUNK,
    }
    at = {"at_s": FAILS_AT * point.step_s}
    return {
        "steady": {**base, "jitter": {}},
        "jitter": base,
        "uneven experts": {**even, "imbalance": routing},
        "arrivals": served,
        "FFN instance away": served | {"failures": [{**at, "ffn": 0, "back_after_s": FFN_BACK_S}]},
        "attention instance away": served
        | {"failures": [{**at, "attention": 0, "back_after_s": ATTENTION_BACK_S}]},
        "prompts": {**served, "requests": with_prompts},
    }


def sustained_per_s(data: Mapping[str, Any], shape: AfdShape, step_s: float) -> float:
    """Returns the requests/s that a unit can process with their prompts.

    A request costs its share of planned decode steps, and its prompt on the slower side.
    """
    tokens = shape.context - OUTPUT / 2
    prefill, ffn = data["times"]["prefill"], data["times"]["ffn"]
    attention_us = prefill["per_row_us"] + prefill["per_row_ktoken_us"] * tokens / 2000
    slower_us = max(
        attention_us / shape.attention.instances, ffn["per_row_us"] + ffn["per_row_beyond_us"]
    )
    prompt_s: float = data["layers"] * tokens * slower_us * 1e-6
    return 1 / (OUTPUT * step_s / shape.batch + prompt_s)


def _requests(point: OperatingPoint, shape: AfdShape, per_s: float) -> dict[str, Any]:
    """Returns the arriving requests; their prompts come prefilled."""
    seconds = STEPS * point.step_s
    return {
        "arrivals": {"kind": "poisson", "per_s": per_s},
        "count": round(per_s * seconds),
        "prompt": {
            "kind": "lognormal",
            "tokens": shape.context - OUTPUT / 2,
            "spread": SPREAD,
        },
        "output": {"kind": "uniform", "tokens": OUTPUT, "spread": SPREAD},
        "measure_from_s": seconds / 2,
        "measure_until_s": seconds,
        "prefill": "elsewhere",
        "max_batch": round(shape.batch / shape.attention.instances),
        "max_tokens": 8192 + round(shape.batch),
    }


def point_cases(cells: Sequence[MapCell]) -> Iterator[PointCase]:
    """Simulates every condition of every cell."""
    for cell in cells:
        point, request = plan_of(cell)
        for name, data in conditions(point, request).items():
            result = simulate(parse_spec(data, f"{cell.model}: {name}"))
            yield PointCase(cell, name, point.step_s, cell.afd, result)


def points_table(cases: Sequence[PointCase]) -> str:
    """Returns Markdown with a row per plan and condition."""
    lines = [
        "| plan | condition | TPOT p50, p99, ms | TTFT p50, p99, s | tokens/s/GPU | of the plan |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        r, cell = case.result, case.cell
        tpot = r.tpot if r.requests.total else r.itl
        ttft = f"{r.ttft.p50:.2f}, {r.ttft.p99:.2f}" if r.requests.total else "-"
        lines.append(
            f"| {cell.model}, {cell.plan}, {cell.context_k}K | {case.condition} |"
            f" {1e3 * tpot.p50:.1f}, {1e3 * tpot.p99:.1f} | {ttft} |"
            f" {r.tokens_per_s_per_gpu:,.0f} | {case.share:.2f} |"
        )
    return "\n".join(lines)
