"""Entry point of the simulator, and the simulation of a constant load."""

from __future__ import annotations

import numpy as np

from afd_planner.simulate.batching import Work
from afd_planner.simulate.failures import ffn_windows, outages
from afd_planner.simulate.inputs import Sources, rest_times, step_input
from afd_planner.simulate.result import RequestCounts, Result
from afd_planner.simulate.serving import Serving
from afd_planner.simulate.spec import Constant, Spec
from afd_planner.simulate.step import run_step
from afd_planner.simulate.tally import Latencies, Tally
from afd_planner.simulate.times import fewer_times, routing_loads, stage_times


def simulate(spec: Spec, *, seed: int = 0, traced_steps: int = 0) -> Result:
    """Runs a simulation. The same spec and seed always give the same result.

    Args:
        traced_steps: Number of steps, from the first one, whose spans the result contains.

    Raises:
        ConfigError: A file named in the spec cannot be used.
    """
    loads = None
    if spec.imbalance:
        loads = routing_loads(spec.imbalance, spec.layers, spec.ffn.instances)
    times, fewer = stage_times(spec.times), fewer_times(spec.times)
    sources = Sources(spec, times, fewer, loads, np.random.default_rng(seed))
    if spec.constant:
        return _constant(spec, spec.constant, sources, seed, traced_steps)
    assert spec.requests is not None
    return Serving(spec, spec.requests, sources, traced_steps).run(seed)


def _constant(spec: Spec, load: Constant, sources: Sources, seed: int, traced_steps: int) -> Result:
    x = spec.attention.instances
    rows = np.full(x, load.rows)
    none = np.zeros_like(rows)
    work = Work(rows, np.full(x, load.context), none, np.zeros(x), rows, none)
    tally = Tally()
    windows = ffn_windows(spec)
    start = np.zeros(x)
    for step in range(load.steps):
        given = step_input(sources, work, start, outages(windows, float(start.min())))
        done = run_step(given, spans=step < traced_steps)
        if np.isinf(done.end).any():
            break  # an FFN instance is lost for good
        end = done.end + rest_times(sources, work)
        tally.add(step, range(x), given, done, end, rows)
        tally.gaps(end - start, rows)
        start = end
    return tally.result(
        spec,
        seed,
        latencies=Latencies(),
        requests=RequestCounts(),
        failures=[w.impact("ffn", tally, stalls_until=w.end) for w in windows],
    )
