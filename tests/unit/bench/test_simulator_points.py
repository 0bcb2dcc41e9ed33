"""The points part of `afd bench simulator`: the conditions of a plan of the map."""

from pathlib import Path

import pytest

from afd_bench.planner.map import MapCell, largest, read_csv
from afd_bench.planner.simulated import plan_of
from afd_bench.simulator_points import LOAD, OUTPUT, PointCase, conditions, points_table
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import parse_spec

MAP = Path(__file__).parents[3] / "docs/results/planner_map.csv"


@pytest.fixture(scope="module")
def cell() -> MapCell:
    found = largest(read_csv(MAP), "qwen3-235b-a22b", "h200")
    assert found is not None
    return found


def test_conditions_of_a_plan(cell):
    point, request = plan_of(cell)
    data = conditions(point, request)
    for changed in data.values():
        for key in ("constant", "requests"):
            if changed.get(key):
                size = "steps" if key == "constant" else "max_steps"
                changed[key] = {**changed[key], size: 3}
    results = {name: simulate(parse_spec(one, name)) for name, one in data.items()}
    steady = results["steady"].itl.p50
    assert steady == pytest.approx(point.step_s, rel=0.05)
    # Without jitter, evenly chosen experts would be faster than the plan's own unevenness.
    assert results["uneven experts"].itl.p50 > steady
    load = data["arrivals"]["requests"]
    answered = point.shape.batch / (OUTPUT * point.step_s)
    assert load["arrivals"]["per_s"] == pytest.approx(LOAD * answered)
    assert load["measure_until_s"] == pytest.approx(2 * load["measure_from_s"])
    here = data["prompts"]["requests"]
    assert here["prefill"] == "here" and here["max_tokens"] > here["max_batch"]
    table = points_table(
        [PointCase(cell, name, point.step_s, cell.afd, r) for name, r in results.items()]
    )
    assert len(table.splitlines()) == 2 + len(data) and "FFN instance away" in table


def test_prompt_times_of_a_plan_are_those_of_its_arithmetic(cell):
    """Per row and layer: 2 FLOPs per weight; per row and token: two products of all heads."""
    point, request = plan_of(cell)
    prefill = conditions(point, request)["steady"]["times"]["prefill"]
    group, gpus = request.model.groups[0], point.shape.attention.gpus
    assert group.attention.kind == "gqa"
    pool, efficiency = point.shape.attention, request.efficiency
    rate = pool.accelerator.math_flops(point.shape.precision.attention_math) * efficiency.attention
    flops = group.attention.prompt_flops(1000.0)
    assert flops == 4 * group.attention.heads * group.attention.head_dim * 1000
    assert prefill["per_row_ktoken_us"] == pytest.approx(1e6 * flops / gpus / rate)
