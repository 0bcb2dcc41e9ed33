"""The vectorised step equals the event queue on random inputs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_planner.simulate.events import run_step_events
from afd_planner.simulate.links import Receivers, drained, drained_each
from afd_planner.simulate.step import Outage, StepInput, run_step


@st.composite
def steps(draw: st.DrawFn) -> StepInput:
    """Draws random steps. Some take their times from a coarse grid, so that ties occur."""
    layers, depth = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    x, y = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    coarse = draw(st.booleans())

    def times(*shape: int, most: float) -> np.ndarray:
        if coarse:
            return rng.integers(0, 4, shape) * (most / 4)
        return rng.random(shape) * most

    rows = rng.integers(0, 5, (depth, x))
    rows[0] = rng.integers(1, 5, x)
    wire = draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    outages = [
        Outage(int(rng.integers(y)), begin, begin + float(rng.random() * 5), float(rng.random()))
        for begin in sorted(rng.random(draw(st.integers(0, 3))) * 10)
    ]
    return StepInput(
        start=times(x, most=3.0),
        rows=rows,
        attention=times(layers, depth, x, most=2.0) * (rows > 0),
        ffn=times(layers, depth, y, most=2.0),
        out_burst=times(layers, depth, x, most=wire),
        out_each=times(depth, x, most=wire),
        back_burst=times(layers, depth, y, most=wire),
        back_each=times(depth, x, most=wire),
        out_latency=times(layers, depth, x, most=0.5),
        back_latency=times(layers, depth, y, most=0.5),
        outages=outages,
        ffn_from=draw(st.sampled_from([-np.inf, 4.0])),
    )


@settings(max_examples=300)
@given(steps())
def test_fast_path_equals_event_queue(step: StepInput):
    np.testing.assert_allclose(run_step(step).end, run_step_events(step), rtol=1e-12, atol=1e-12)


@settings(max_examples=200)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**32), st.booleans())
def test_receiving_links_equal_messages_processed_one_by_one(n, m, seed, coarse):
    rng = np.random.default_rng(seed)
    first, each = rng.random(n) * 4, rng.random(m) * rng.choice([0.0, 0.1, 2.0])
    if coarse:
        first, each = np.round(first), np.round(each)
    free = rng.random(m) * 4
    for i in range(m):
        clock = free[i]
        for arrival in sorted(first):
            clock = max(clock, arrival) + each[i]
        assert drained_each(first, Receivers.of(each), free)[i] == pytest.approx(clock)
    sizes = rng.random(n) * rng.choice([0.0, 0.1, 2.0])
    clock = free[0]
    for i in np.argsort(first, kind="stable"):
        clock = max(clock, first[i]) + sizes[i]
    assert drained(first, sizes, float(free[0])) == pytest.approx(clock)
