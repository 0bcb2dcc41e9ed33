"""A plan as a simulation: without jitter it takes the planned time, with jitter a little more."""

import pytest
from planner_support import request

from afd_planner.report.simulation import simulation_data
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import parse_spec
from afd_planner.sizing.decide import make_plan


@pytest.mark.parametrize(
    ("model", "gpu", "changes"),
    [
        ("deepseek-v3", "h200", {"gpus": 64}),
        ("kimi-k2", "mi300x", {"gpus": 64, "context": 16384}),
        ("qwen3-235b-a22b", "h200", {"gpus": 64, "depths": (3,)}),
        ("step-3", "h800", {"gpus": 32, "depths": (1,)}),
    ],
)
def test_a_simulated_plan_takes_the_planned_time(model, gpu, changes):
    plan = make_plan(request(model, gpu, **changes))
    data = simulation_data(plan.afd, plan.request)
    data["constant"]["steps"] = 6
    calm = simulate(parse_spec({**data, "jitter": {}}, "calm"))
    # Rows are whole per instance and micro-batch, links are shared, and a step has a first and a
    # last layer, which the planner's formula for the steady state leaves out.
    assert calm.step.p50 == pytest.approx(plan.afd.step_s, rel=0.08)
    noisy = simulate(parse_spec(data, "noisy"))
    assert 0.99 * calm.step.p50 < noisy.step.p50 < 1.2 * calm.step.p50
    assert noisy.gpus == plan.afd.shape.total_gpus
