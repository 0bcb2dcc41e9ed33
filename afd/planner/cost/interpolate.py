"""Piecewise-linear interpolation of measured times, with one stated rule outside of the data.

Inside the measured range a value lies on the straight line between its neighbours, so monotone data
give a monotone curve. Below the first point the time stays that of the first point: fewer rows are
not assumed to be cheaper than what was seen. Above the last point the last segment goes on, level
where it falls. From a single point the time grows in proportion to the argument, which is an upper
bound for a stage that has any fixed cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Times over one argument. x: strictly ascending, float64 [n]; y: seconds, float64 [n]."""

    x: Array
    y: Array

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """From (argument, seconds) in any order; repeated arguments count with their median."""
        groups: dict[float, list[float]] = {}
        for x, y in points:
            groups.setdefault(float(x), []).append(y)
        xs = sorted(groups)
        return cls(np.array(xs), np.array([float(np.median(groups[x])) for x in xs]))

    def at(self, x: Array) -> Array:
        """Seconds at every argument, same shape as ``x``."""
        inside = np.interp(x, self.x, self.y)
        beyond = np.maximum(np.asarray(x, float) - self.x[-1], 0.0)
        return inside + beyond * self._slope

    def covers(self, x: Array) -> NDArray[np.bool_]:
        """Where an argument lies within the measured range."""
        return (x >= self.x[0]) & (x <= self.x[-1])

    def holds(self, x: float) -> bool:
        """Whether this very argument was measured."""
        return bool(np.any(self.x == x))

    def falls(self) -> list[tuple[float, float]]:
        """Neighbouring arguments between which the time falls."""
        pairs = zip(pairwise(self.x), pairwise(self.y), strict=True)
        return [(float(a), float(b)) for (a, b), (low, high) in pairs if high < low]

    @property
    def _slope(self) -> float:
        """Seconds per unit of the argument beyond the last point."""
        if len(self.x) == 1:
            return float(self.y[0] / self.x[0]) if self.x[0] > 0 else 0.0
        return max(0.0, float((self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2])))


@dataclass(frozen=True)
class Surface:
    """Times over two arguments: one curve over the first for each measured value of the second.

    The curves need not share their points; on a full grid this is bilinear interpolation. Between
    two curves it is linear in the second argument. Outside, the rules of the module hold along each
    argument.
    """

    keys: Array  # second argument of each curve, strictly ascending [k]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float, float]]) -> Surface:
        """From (first argument, second argument, seconds) in any order."""
        groups: dict[float, list[tuple[float, float]]] = {}
        for first, second, y in points:
            groups.setdefault(float(second), []).append((first, y))
        keys = sorted(groups)
        return cls(np.array(keys), tuple(Curve.of(groups[key]) for key in keys))

    def at(self, first: Array, second: Array) -> Array:
        """Seconds at every pair of arguments; the two broadcast against each other."""
        first, second = np.broadcast_arrays(np.asarray(first, float), np.asarray(second, float))
        levels = np.stack([curve.at(first) for curve in self.curves])
        keys = self.keys
        if len(keys) == 1:
            scale = np.maximum(second / keys[0], 1.0) if keys[0] > 0 else 1.0
            return np.asarray(levels[0] * scale)
        left = np.clip(np.searchsorted(keys, second, side="right") - 1, 0, len(keys) - 2)
        low = np.take_along_axis(levels, left[None], 0)[0]
        high = np.take_along_axis(levels, left[None] + 1, 0)[0]
        share = np.maximum((second - keys[left]) / (keys[left + 1] - keys[left]), 0.0)
        rise = np.where(share > 1.0, np.maximum(high - low, 0.0) * (share - 1.0), 0.0)
        return np.asarray(low + (high - low) * np.minimum(share, 1.0) + rise)

    def covers(self, first: float, second: float) -> bool:
        """Whether the pair lies between measured curves and within the range of both."""
        if not self.keys[0] <= second <= self.keys[-1]:
            return False
        return all(bool(curve.covers(np.float64(first))) for curve in self._around(second))

    def holds(self, first: float, second: float) -> bool:
        """Whether this very pair was measured."""
        return any(
            float(key) == second and curve.holds(first)
            for key, curve in zip(self.keys, self.curves, strict=True)
        )

    def _around(self, second: float) -> tuple[Curve, ...]:
        right = int(np.searchsorted(self.keys, second, side="left"))
        if self.keys[right] == second:
            return (self.curves[right],)
        return self.curves[right - 1], self.curves[right]
