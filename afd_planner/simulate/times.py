"""Stage times of a simulation for many instances: stated, measured, with jitter or imbalance."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from afd.errors import ConfigError
from afd.topology import expert_ranges
from afd_planner.cost.interpolate import Array
from afd_planner.cost.measured import MeasuredTimes, load_measured
from afd_planner.facts.files import NATURAL_LOADS
from afd_planner.simulate.spec import Imbalance, Jitter, Linear, Times
from afd_planner.simulate.workload import Counts

_US = 1e-6

MOST_DRAWN = 262_147
"""Most factors that are drawn for one stage of one step; a larger one repeats them. The number is
prime, so that no instance meets the same factors in two layers."""


@dataclass(frozen=True)
class StageTimes:
    """Functions that return the seconds of each stage.

    Arguments are float arrays of rows (and context tokens per row), as in the spec. The argument of
    ``wire`` is the bytes of a message; only a measured file provides it. The second argument of
    ``ffn`` says whether the step has prompts.
    """

    attention: Callable[[Array, Array], Array]
    ffn: Callable[[Array, bool], Array]
    rest: Callable[[Array], Array]
    prefill: Callable[[Array, Array], Array]
    wire: Callable[[Array], Array]


def stage_times(times: Times) -> StageTimes:
    """Returns the stage times of a spec. Raises ConfigError if a stage has none."""
    measured = load_measured(times.measured) if times.measured else None
    no_time = Linear()
    attention = _attention(times.attention, measured)
    if times.prefill:
        stated = times.prefill

        def prefill(rows: Array, context: Array) -> Array:
            return linear(stated, rows, context)

    elif measured and measured.prefill:
        curve = measured.prefill

        def prefill(rows: Array, context: Array) -> Array:
            return curve.at(rows)

    else:

        def prefill(rows: Array, context: Array) -> Array:
            return attention(rows, np.zeros_like(rows))

    if times.rest or measured is None or measured.rest is None:
        rest = _stated(times.rest or no_time)
    else:
        rest = measured.rest.at
    ffn = _ffn(times.ffn, measured, times.experts_held)
    scale = times.scale
    return StageTimes(
        lambda rows, context: scale.attention * attention(rows, context),
        lambda rows, prompts: (scale.ffn_prefill if prompts else scale.ffn) * ffn(rows),
        lambda rows: scale.rest * rest(rows),
        lambda rows, context: scale.prefill * prefill(rows, context),
        _wire(measured),
    )


def fewer_times(times: Times) -> dict[int, StageTimes]:
    """Returns the stage times of steps with fewer than all attention instances, by their number."""
    return {
        fewer.active: stage_times(
            times.model_copy(update={"measured": fewer.measured, "scale": fewer.scale})
        )
        for fewer in times.fewer
    }


def _wire(measured: MeasuredTimes | None) -> Callable[[Array], Array]:
    def wire(num_bytes: Array) -> Array:
        if measured is None or measured.wire is None:
            raise ConfigError("the measured file has no wire points; state wire.gbit_per_s")
        return measured.wire.at(num_bytes)

    return wire


def _attention(
    stated: Linear | None, measured: MeasuredTimes | None
) -> Callable[[Array, Array], Array]:
    if stated:
        return lambda rows, context: linear(stated, rows, context)
    assert measured is not None
    if measured.attention is None:
        raise _missing("attention")
    return measured.attention.at


def _ffn(
    stated: Linear | None, measured: MeasuredTimes | None, held: float | None
) -> Callable[[Array], Array]:
    if stated:
        return _stated(stated)
    assert measured is not None
    if measured.ffn is None:
        raise _missing("ffn")
    surface, line = measured.ffn, np.asarray(measured.experts_line(held))
    return lambda rows: surface.at(rows, line)


def _missing(stage: str) -> ConfigError:
    return ConfigError(f"the measured file has no {stage} points; state times.{stage} in the spec")


def _stated(times: Linear) -> Callable[[Array], Array]:
    return lambda rows: linear(times, rows, 0.0)


def linear(times: Linear, rows: Array, context: Array | float) -> Array:
    """Returns seconds by the formula of :class:`afd_planner.simulate.spec.Linear`; 0 for 0 rows."""
    cost = times.fixed_us + times.per_row_us * rows
    cost = cost + times.per_row_ktoken_us * rows * context / 1000.0
    if times.per_row_beyond_us:
        cost = cost + times.per_row_beyond_us * np.maximum(rows - times.beyond_rows, 0.0)
    return np.asarray(np.where(rows > 0, np.maximum(cost, times.at_least_us), 0.0) * _US)


def jittered(times: Array, jitter: Jitter, rng: np.random.Generator) -> Array:
    """Returns the times, each multiplied by a random factor and extended by random spikes.

    The factor has a mean of 1, so the mean stage time does not change. A step consists of sums and
    maxima, which are convex, so the mean step can only become longer. There is one exception: if
    receiving links are the bottleneck, senders that spread out start to fill them earlier.
    """
    if jitter.kind == "none" and jitter.spike_chance == 0.0:
        return times
    out = np.asarray(times)
    if jitter.kind == "lognormal" and jitter.variation:
        sigma = np.float32(np.sqrt(np.log1p(jitter.variation**2)))
        factor = rng.standard_normal(min(out.size, MOST_DRAWN), dtype=np.float32)
        factor *= sigma
        factor -= sigma**2 / 2
        out = out * np.resize(np.exp(factor, out=factor), out.shape)
    elif jitter.kind == "uniform" and jitter.variation:
        out = out * (1.0 + jitter.variation * np.sqrt(3.0) * rng.uniform(-1.0, 1.0, out.shape))
    elif jitter.kind == "values":
        values = np.array(jitter.values)
        out = out * rng.choice(values / values.mean(), out.shape)
    if jitter.spike_chance:
        spikes = rng.random(out.shape) < jitter.spike_chance
        out = out + spikes * (jitter.spike_us * _US) * (times > 0)
    return out


@dataclass(frozen=True)
class RoutingLoads:
    """Expert loads per layer. ``loads``: [L, E] share of all choices per expert; rows sum to 1."""

    loads: Array
    top_k: int
    ranks: int  # expert-parallel ranks of the whole FFN pool
    instances: int

    def factors(self, rows: Counts, rng: np.random.Generator) -> Array:
        """Returns the rows of the busiest rank of each FFN instance over the mean rank: [L, d, y].

        The top_k experts of each row are drawn independently.

        Args:
            rows: [d] rows of all attention instances together.
        """
        layers, experts = self.loads.shape
        starts = [start for start, _ in expert_ranges(experts, self.ranks)]
        out = np.empty((layers, rows.size, self.instances))
        for mb, count in enumerate(rows.astype(int) * self.top_k):
            drawn = rng.multinomial(count, self.loads)
            per_rank = np.add.reduceat(drawn, starts, axis=1) * (self.ranks / max(count, 1))
            out[:, mb] = per_rank.reshape(layers, self.instances, -1).max(axis=2)
        return out


def routing_loads(given: Imbalance, layers: int, instances: int) -> RoutingLoads:
    """Returns the expert loads of a simulated model, from a file of measured loads.

    If the model has more layers than the file, layers repeat. If it has another number of experts,
    their loads are drawn from those of the layer, with a fixed seed.

    Raises:
        ConfigError: The file is invalid, the text is unknown, or there are more ranks than experts.
    """
    data = _read_routing(given.routing)
    if given.text not in data["texts"]:
        texts = " and ".join(data["texts"])
        raise ConfigError(f"{given.routing.name} has no text {given.text!r}; it has {texts}")
    experts = given.experts or int(data["experts"])
    ranks = given.ranks * instances
    if ranks > experts:
        raise ConfigError(
            f"{instances} FFN instances of {given.ranks} expert-parallel ranks cannot share"
            f" {experts} experts; lower imbalance.ranks (1 means tensor parallelism)"
        )
    rng = np.random.default_rng(0)
    rows = []
    for layer in range(layers):
        measured = data["texts"][given.text]["layers"]
        load = np.array(measured[layer % len(measured)]["load"])
        if experts != load.size:
            load = rng.choice(load, experts)
        rows.append(load / load.sum())
    return RoutingLoads(np.array(rows), given.top_k or int(data["top_k"]), ranks, instances)


def _read_routing(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"cannot read {path} ({err}); imbalance.routing must name a file like {NATURAL_LOADS}"
        ) from None
    if not isinstance(data, dict) or not {"experts", "top_k", "texts"} <= set(data):
        raise ConfigError(
            f"{path} lacks experts, top_k or texts; {NATURAL_LOADS} is an example of the format"
        )
    return data
