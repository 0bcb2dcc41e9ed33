"""Uneven expert loads, and the load of the busiest of n expert groups.

Expert parallelism waits for its busiest group. ``ExpertSpread`` describes how much expert loads
vary; ``ExpertSpread.slowest`` converts that into the ratio of the busiest group's rows to the mean,
the ``imbalance`` of :class:`afd_planner.cost.shape.Routing`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

import numpy as np

from afd.errors import ConfigError
from afd_planner.cost.interpolate import Array
from afd_planner.facts.files import NATURAL_LOADS

MOST_GROUPS = 1024
"""Size of the table of expected maxima; no model has more experts."""


@dataclass(frozen=True)
class ExpertSpread:
    """Spread of expert loads.

    Attributes:
        name: Origin of the data, printed with the plan's assumptions.
        spread: Standard deviation of expert loads over their mean, averaged over layers. 0 means
            that all experts are equally popular.
        chance: Whether rows choose experts at random (True) or exactly evenly (False).
    """

    name: str
    spread: float
    chance: bool = True

    def slowest(self, rows: Array, groups: Array, experts: int, top_k: int) -> Array:
        """Returns the rows of the busiest of ``groups`` equal expert groups over the mean.

        The rows of an expert vary with its popularity (``spread``) and by chance (a Poisson count
        with mean rows * top_k / experts). A group averages over experts / groups experts. The
        largest of n normal values lies ``_largest(n)`` standard deviations above the mean. The
        result is at least 1 and at most ``groups`` (all rows in one group).

        Args:
            rows: float64 array, rows of the micro-batch over all groups.
            groups: float64 array that broadcasts with ``rows``.
        """
        if top_k >= experts:
            return np.ones(np.broadcast_shapes(rows.shape, groups.shape))
        variance: float | Array = self.spread**2
        if self.chance:
            variance = variance + experts / np.maximum(rows * top_k, 1.0)
        deviation = np.sqrt(variance * groups / experts)
        return np.minimum(1.0 + deviation * _largest(groups), np.maximum(groups, 1.0))


EVEN_SPREAD = ExpertSpread("even", 0.0, chance=False)


def _largest(groups: Array) -> Array:
    """Returns the expected maximum of n standard normal values (Blom 1958); 0 for n = 1."""
    return _table()[np.minimum(groups, MOST_GROUPS).astype(np.intp)]


@cache
def _table() -> Array:
    normal = NormalDist()
    values = [normal.inv_cdf((n - 0.375) / (n + 0.25)) for n in range(2, MOST_GROUPS + 1)]
    return np.array([0.0, 0.0, *values])


def load_spread(path: Path = NATURAL_LOADS) -> ExpertSpread:
    """Returns the spread over all texts and layers of a file of expert loads, weighted by rows.

    Raises:
        ConfigError: The file cannot be read or has another format than
            afd_planner/data/routing/README.md describes.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        experts = int(data["experts"])
        weighted = [
            (
                float(text["rows"]),
                fmean(pstdev(layer["load"]) * experts for layer in text["layers"]),
            )
            for text in data["texts"].values()
        ]
        spread = sum(rows * value for rows, value in weighted) / sum(rows for rows, _ in weighted)
    except OSError as err:
        raise ConfigError(f"cannot read routing data {path}: {err.strerror}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError):
        raise ConfigError(
            f"{path} is not a file of expert loads; {NATURAL_LOADS} is an example of the format"
        ) from None
    if not math.isfinite(spread):
        raise ConfigError(f"{path} has loads that are not finite; measure them again")
    return ExpertSpread(path.stem, spread)
