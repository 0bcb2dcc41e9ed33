"""Uneven expert loads, and the load of the busiest of n expert groups.

Expert parallelism waits for its busiest group. ``ExpertSpread`` describes how much expert loads
vary; ``ExpertSpread.slowest`` converts that into the ratio of the busiest group's rows to the mean,
the ``imbalance`` of :class:`afd_planner.cost.shape.Routing`.
"""

from __future__ import annotations

import heapq
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
        placed: Whether the placement of experts and of their copies follows these loads.
        worst: Spread of the most uneven layer of any text; 0 if unknown.
    """

    name: str
    spread: float
    chance: bool = True
    placed: bool = True
    worst: float = 0.0

    def at_worst(self) -> ExpertSpread:
        """Returns the loads of the most uneven layer, with a placement that does not help."""
        return ExpertSpread("worst", max(self.worst, self.spread), self.chance, placed=False)

    def slowest(
        self, rows: Array, groups: Array, experts: int, top_k: int, copies: Array | float = 0.0
    ) -> Array:
        """Returns the rows of the busiest of ``groups`` equal expert groups over the mean.

        The rows of an expert vary with its popularity (``spread``) and by chance (a Poisson count
        with mean rows * top_k / experts). A group averages over experts / groups experts. The
        largest of n normal values lies ``_largest(n)`` standard deviations above the mean. The
        result is at least 1 and at most ``groups`` (all rows in one group).

        With ``copies``, experts are placed by their popularity and the most popular ones are
        copied (``_packed``); only chance and what the placement cannot even out remain.

        Args:
            rows: float64 array, rows of the micro-batch over all groups.
            groups: float64 array that broadcasts with ``rows``.
            copies: Copies of experts per group, broadcasts with ``rows``.
        """
        if top_k >= experts:
            return np.ones(np.broadcast_shapes(rows.shape, groups.shape))
        largest = _largest(groups)
        popular = self.spread * np.sqrt(groups / experts) * largest
        for count in range(1, int(np.max(copies)) + 1) if self.spread and self.placed else ():
            table = _packed(self.spread, experts, count)
            even = table[np.minimum(groups, experts).astype(np.intp)]
            popular = np.where(copies == count, np.minimum(even, popular), popular)
        chance: Array | float = 0.0
        if self.chance:
            chance = np.sqrt(groups / np.maximum(rows * top_k, 1.0)) * largest
        return np.minimum(1.0 + np.hypot(popular, chance), np.maximum(groups, 1.0))


EVEN_SPREAD = ExpertSpread("even", 0.0, chance=False)
EQUAL_SPREAD = ExpertSpread("equal", 0.0)
"""Equally popular experts, which rows still choose at random."""


def _largest(groups: Array) -> Array:
    """Returns the expected maximum of n standard normal values (Blom 1958); 0 for n = 1."""
    return _table()[np.minimum(groups, MOST_GROUPS).astype(np.intp)]


@cache
def _table() -> Array:
    normal = NormalDist()
    values = [normal.inv_cdf((n - 0.375) / (n + 0.25)) for n in range(2, MOST_GROUPS + 1)]
    return np.array([0.0, 0.0, *values])


@cache
def _packed(spread: float, experts: int, copies: int) -> Array:
    """Returns the excess of the busiest of n groups over the mean, for n = 0..experts.

    Loads are the quantiles of a log-normal distribution with this coefficient of variation. Each of
    the n * copies copies halves (thirds, ...) the load of the expert that is then largest. All are
    dealt to the groups in descending order, back and forth.
    """
    sigma = math.sqrt(math.log1p(spread**2))
    normal = NormalDist(0.0, sigma)
    loads = [math.exp(normal.inv_cdf((i + 0.5) / experts)) for i in range(experts)]
    mean = sum(loads) / experts
    heap = [(-load / mean, 1, load / mean) for load in loads]
    heapq.heapify(heap)
    table = np.zeros(experts + 1)
    for groups in range(1, experts + 1):
        for _ in range(copies):
            _, held, load = heap[0]
            heapq.heapreplace(heap, (-load / (held + 1), held + 1, load))
        shares = np.sort(np.repeat([-e for e, _, _ in heap], [held for _, held, _ in heap]))[::-1]
        rounds = np.zeros((math.ceil(shares.size / groups), groups))
        rounds.ravel()[: shares.size] = shares
        rounds[1::2] = rounds[1::2, ::-1]
        table[groups] = rounds.sum(axis=0).max() * groups / experts - 1.0
    return table


def load_spread(path: Path = NATURAL_LOADS) -> ExpertSpread:
    """Returns the spread over all texts and layers of a file of expert loads, weighted by rows.

    Raises:
        ConfigError: The file cannot be read or has another format than
            afd_planner/data/routing/README.md describes.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        experts = int(data["experts"])
        texts = [
            (float(text["rows"]), [pstdev(layer["load"]) * experts for layer in text["layers"]])
            for text in data["texts"].values()
        ]
        weighted = [(rows, fmean(layers)) for rows, layers in texts]
        worst = max(max(layers) for _, layers in texts)
        spread = sum(rows * value for rows, value in weighted) / sum(rows for rows, _ in weighted)
    except OSError as err:
        raise ConfigError(f"cannot read routing data {path}: {err.strerror}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError):
        raise ConfigError(
            f"{path} is not a file of expert loads; {NATURAL_LOADS} is an example of the format"
        ) from None
    if not math.isfinite(spread):
        raise ConfigError(f"{path} has loads that are not finite; measure them again")
    return ExpertSpread(path.stem, spread, worst=worst)
