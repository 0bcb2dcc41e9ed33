"""How unevenly experts are loaded, and what that costs the slowest of n expert groups. Pure.

Expert parallelism waits for its busiest group. ``ExpertSpread`` says how far expert loads spread;
``slowest`` turns that into the ratio of the busiest group's rows to the mean, the ``imbalance`` of
:class:`afd.planner.cost.shape.Routing`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from afd.errors import ConfigError
from afd.planner.facts.files import CONFIGS

NATURAL = CONFIGS / "routing" / "afd-tiny-chat.json"

Array = NDArray[np.float64]

MOST_GROUPS = 1024
"""Expert groups beyond which the largest is not told apart; no model has so many experts."""


@dataclass(frozen=True)
class ExpertSpread:
    """Spread of expert loads.

    name: where it comes from, for the plan's list of assumptions. spread: standard deviation of an
    expert's load over its mean, averaged over layers; 0 = equally popular. chance: whether rows
    fall on experts at random (False: exactly evenly).
    """

    name: str
    spread: float
    chance: bool = True

    def slowest(self, rows: Array, groups: Array, experts: int, top_k: int) -> Array:
        """Rows of the busiest of ``groups`` equal groups of experts over the mean group's rows.

        An expert's share varies by ``spread`` (popularity) and by chance: it gets rows * top_k /
        experts rows on average, with the variance of a Poisson count. A group averages over
        experts / groups experts, and the largest of n normal values lies ``_largest(n)``
        deviations above their mean. At least 1, at most ``groups`` (everything on one).

        Args:
            rows: float64 array, rows of the micro-batch over all groups.
            groups: float64 array that broadcasts with ``rows``.
        """
        if top_k >= experts:
            return np.ones(np.broadcast_shapes(rows.shape, groups.shape))
        variance = self.spread**2
        if self.chance:
            variance = variance + experts / np.maximum(rows * top_k, 1.0)
        deviation = np.sqrt(variance * groups / experts)
        return np.minimum(1.0 + deviation * _largest(groups), np.maximum(groups, 1.0))


EVEN = ExpertSpread("even", 0.0, chance=False)


def _largest(groups: Array) -> Array:
    """Expected maximum of n standard normal values (Blom 1958); 0 for one."""
    return _table()[np.minimum(groups, MOST_GROUPS).astype(np.intp)]


@cache
def _table() -> Array:
    normal = NormalDist()
    values = [normal.inv_cdf((n - 0.375) / (n + 0.25)) for n in range(2, MOST_GROUPS + 1)]
    return np.array([0.0, 0.0, *values])


def load_spread(path: Path = NATURAL) -> ExpertSpread:
    """Spread over the texts and layers of a file of configs/routing, weighted by rows.

    Raises:
        ConfigError: the file is not of the form that configs/routing/README.md describes.
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
            f"{path} is not routing data; see configs/routing/README.md for its form"
        ) from None
    if not math.isfinite(spread):
        raise ConfigError(f"{path} holds loads that are not numbers")
    return ExpertSpread(path.stem, spread)
