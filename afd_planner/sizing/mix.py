"""Fills a budget of GPUs with units of several sizes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from afd_planner.cost.interpolate import Array


class Fill:
    """The best ways to fill 0..``most`` GPUs with units; a unit may be used any number of times.

    Attributes:
        value: [most + 1] highest sum of rates for each number of GPUs; GPUs may stay idle.
    """

    def __init__(self, rates: Mapping[int, float], most: int) -> None:
        """``rates``: size of a unit in GPUs to its rate."""
        sizes = np.array(sorted(rates), dtype=np.intp)
        each = np.array([rates[int(size)] for size in sizes])
        self.value: Array = np.zeros(most + 1)
        self._chosen = np.zeros(most + 1, dtype=np.intp)
        for gpus in range(1, most + 1):
            self.value[gpus] = self.value[gpus - 1]
            fitting = int(np.searchsorted(sizes, gpus, side="right"))
            if not fitting:
                continue
            sums = self.value[gpus - sizes[:fitting]] + each[:fitting]
            best = fitting - 1 - int(np.argmax(sums[::-1]))  # of equal ones, the largest unit
            if sums[best] > self.value[gpus] * (1 + 1e-9):
                self.value[gpus], self._chosen[gpus] = sums[best], sizes[best]

    def counts(self, gpus: int) -> Counter[int]:
        """Returns how many units of each size fill ``gpus`` GPUs best."""
        found: Counter[int] = Counter()
        while gpus > 0:
            size = int(self._chosen[gpus])
            found[size] += 1 if size else 0
            gpus -= size or 1
        return +found


def fill(rates: Mapping[int, float], gpus: int) -> Counter[int]:
    """Returns how many units of each size fill ``gpus`` GPUs best.

    Far above the largest unit, copies of the unit with the best rate per GPU fill the difference.
    """
    if not rates:
        return Counter()
    largest, densest = max(rates), max(rates, key=lambda size: rates[size] / size)
    copies = max(0, (gpus - 2 * largest) // densest)
    found = Fill(rates, gpus - copies * densest).counts(gpus - copies * densest)
    found[densest] += copies
    return +found
