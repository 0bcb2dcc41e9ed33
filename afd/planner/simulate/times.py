"""Stage times of a simulation for many instances at once: stated, measured, random, imbalanced."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afd.errors import ConfigError
from afd.planner.cost.interpolate import Array
from afd.planner.cost.measured import MeasuredTimes, load_measured
from afd.planner.simulate.spec import Imbalance, Jitter, Linear, Spec
from afd.topology import expert_ranges

_US = 1e-6


@dataclass(frozen=True)
class StageTimes:
    """Seconds per stage. Arguments: float arrays of rows (and context), as in the spec; bytes of a
    message for ``wire``, which only a measured file has."""

    attention: Callable[[Array, Array], Array]
    ffn: Callable[[Array], Array]
    rest: Callable[[Array], Array]
    prefill: Callable[[Array], Array]
    wire: Callable[[Array], Array]


def stage_times(spec: Spec) -> StageTimes:
    """The times that a spec states or names. Raises ConfigError where a stage has none."""
    times = spec.times
    measured = load_measured(times.measured) if times.measured else None
    no_time = Linear()
    attention = _attention(times.attention, measured)
    if times.prefill:
        prefill = _stated(times.prefill)
    elif measured and measured.prefill:
        prefill = measured.prefill.at
    else:

        def prefill(rows: Array) -> Array:
            return attention(rows, np.zeros_like(rows))

    if times.rest or measured is None or measured.rest is None:
        rest = _stated(times.rest or no_time)
    else:
        rest = measured.rest.at
    ffn = _ffn(times.ffn, measured, times.experts_held)
    return StageTimes(attention, ffn, rest, prefill, _wire(measured))


def _wire(measured: MeasuredTimes | None) -> Callable[[Array], Array]:
    def answer(num_bytes: Array) -> Array:
        if measured is None or measured.wire is None:
            raise ConfigError("the measured file has no wire points; state wire.gbit_per_s")
        return measured.wire.at(num_bytes)

    return answer


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
    surface, line = measured.ffn, measured.experts_line(held)
    return lambda rows: surface.at(rows, np.float64(line))


def _missing(stage: str) -> ConfigError:
    return ConfigError(f"the measured file has no {stage} points; state times.{stage} in the spec")


def _stated(times: Linear) -> Callable[[Array], Array]:
    return lambda rows: linear(times, rows, np.float64(0.0))


def linear(times: Linear, rows: Array, context: Array) -> Array:
    """Seconds after the formula of :class:`afd.planner.simulate.spec.Linear`; 0 for no rows."""
    cost = times.fixed_us + times.per_row_us * rows
    cost = cost + times.per_row_ktoken_us * rows * context / 1000.0
    return np.asarray(np.where(rows > 0, np.maximum(cost, times.at_least_us), 0.0) * _US)


def jittered(times: Array, jitter: Jitter, rng: np.random.Generator) -> Array:
    """The times with a random factor of mean 1 and spikes, each drawn on its own.

    The mean of the factor is 1, so that the mean stage time stays. Sums and maxima are convex, so
    the mean step can then only become longer; but for one case: where receiving links are the
    bottleneck, senders that spread out keep the link busy from an earlier moment on.
    """
    if jitter.kind == "none" and jitter.spike_chance == 0.0:
        return times
    out = np.array(times)
    if jitter.kind == "lognormal" and jitter.variation:
        sigma = np.sqrt(np.log1p(jitter.variation**2))
        out *= rng.lognormal(-(sigma**2) / 2, sigma, out.shape)
    elif jitter.kind == "uniform" and jitter.variation:
        out *= 1.0 + jitter.variation * np.sqrt(3.0) * rng.uniform(-1.0, 1.0, out.shape)
    elif jitter.kind == "values":
        values = np.array(jitter.values)
        out *= rng.choice(values / values.mean(), out.shape)
    if jitter.spike_chance:
        spikes = rng.random(out.shape) < jitter.spike_chance
        out += spikes * (jitter.spike_us * _US) * (times > 0)
    return out


@dataclass(frozen=True)
class RoutingLoads:
    """Share of the chosen slots per expert: [L, E], rows sum to 1; top_k slots per row."""

    loads: Array
    top_k: int
    ranks: int  # expert-parallel ranks of the whole FFN pool
    instances: int

    def factors(self, rows: Array, rng: np.random.Generator) -> Array:
        """Rows of the busiest rank of each FFN instance over the mean rank's: [L, d, y], >= 0.

        rows: [d], of all attention instances together. Each row's slots are drawn independently.
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
    """Expert loads for a simulated model from a file of configs/routing.

    A model with another number of experts or layers than the file's gets loads drawn from it: the
    layers in turn, and each expert's load from those of the layer (always the same draw).

    Raises:
        ConfigError: not such a file, an unknown text, or more ranks than experts.
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
            f" {experts} experts; lower imbalance.ranks (1: tensor parallel inside)"
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


def _read_routing(path: Path) -> dict[str, dict[str, dict[str, list[dict[str, list[float]]]]]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"cannot read {path} ({err}); name a file of configs/routing as imbalance.routing"
        ) from None
    if not isinstance(data, dict) or not {"experts", "top_k", "texts"} <= set(data):
        raise ConfigError(f"{path} has no experts, top_k and texts; see configs/routing/README.md")
    return data
