"""Requests of a simulation: arrival times and lengths."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afd.errors import ConfigError
from afd_planner.cost.interpolate import Array
from afd_planner.simulate.spec import Arrivals, Lengths, Requests

Counts = NDArray[np.int64]

_COLUMNS = ("arrival_s", "prompt", "output")


@dataclass(frozen=True)
class Workload:
    """Requests. arrival: [n] seconds, ascending. prompt, output: [n] tokens, at least 1."""

    arrival: Array
    prompt: Counts
    output: Counts


def make_workload(given: Requests, rng: np.random.Generator) -> Workload:
    """Draws or reads the requests of a spec. Raises ConfigError if a trace is invalid."""
    arrivals = given.arrivals
    if arrivals.kind == "trace":
        assert arrivals.file is not None
        return read_trace(arrivals.file, given.count)
    assert given.count is not None and given.prompt is not None and given.output is not None
    return Workload(
        _moments(arrivals, given.count, rng),
        _lengths(given.prompt, given.count, rng),
        _lengths(given.output, given.count, rng),
    )


def _moments(arrivals: Arrivals, count: int, rng: np.random.Generator) -> Array:
    if arrivals.kind == "together":
        return np.zeros(count)
    assert arrivals.per_s is not None
    if arrivals.kind == "steady":
        return np.arange(count) / arrivals.per_s
    if arrivals.kind == "poisson":
        return np.cumsum(rng.exponential(1.0 / arrivals.per_s, count))
    if arrivals.kind == "gamma":
        shape = arrivals.burstiness
        return np.cumsum(rng.gamma(shape, 1.0 / (arrivals.per_s * shape), count))
    sizes = rng.geometric(1.0 / arrivals.burst, count)  # more bursts than needed
    bursts = np.cumsum(rng.exponential(arrivals.burst / arrivals.per_s, count))
    return np.repeat(bursts, sizes)[:count]


def _lengths(given: Lengths, count: int, rng: np.random.Generator) -> Counts:
    drawn: Array
    if given.kind == "fixed":
        drawn = np.full(count, given.tokens)
    elif given.kind == "uniform":
        drawn = given.tokens * (1.0 + given.spread * rng.uniform(-1.0, 1.0, count))
    else:
        sigma = math.sqrt(math.log1p(given.spread**2))
        drawn = given.tokens * rng.lognormal(-(sigma**2) / 2, sigma, count)
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def read_trace(path: Path, count: int | None) -> Workload:
    """Returns the first ``count`` requests of a CSV file (all if None), in order of arrival.

    Raises:
        ConfigError: The file is invalid. The message names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if set(_COLUMNS) - set(reader.fieldnames or ()):
                raise ConfigError(f"{path} must have the columns {', '.join(_COLUMNS)}")
            rows = [_entry(row, f"{path}, line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read the trace {path} ({err}); give a CSV file") from None
    if not rows:
        raise ConfigError(f"{path} has no requests; give a CSV file with at least one line")
    rows.sort(key=lambda row: row[0])
    arrival, prompt, output = zip(*rows[:count], strict=True)
    return Workload(np.array(arrival), np.array(prompt), np.array(output))


def _entry(row: dict[str, str], place: str) -> tuple[float, int, int]:
    try:
        arrival, prompt, output = float(row["arrival_s"]), int(row["prompt"]), int(row["output"])
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: arrival_s, prompt and output must be numbers") from None
    if not math.isfinite(arrival) or arrival < 0 or prompt < 1 or output < 1:
        raise ConfigError(f"{place}: arrival_s must be at least 0, prompt and output at least 1")
    return arrival, prompt, output
