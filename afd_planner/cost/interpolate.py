"""Piecewise-linear interpolation of measured times, with fixed rules for extrapolation.

- Inside the measured range, values are interpolated linearly. Monotone data give a monotone curve.
- Below the first point, the time is that of the first point: fewer rows are not assumed to cost
  less than any measured time.
- Above the last point, the last segment continues; if it falls, the time stays constant.
- A single point is extended in proportion to the argument. This is an upper bound for a stage with
  a fixed cost.
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
    """Times over one argument. x: float64 [n], strictly ascending; y: seconds, float64 [n]."""

    x: Array
    y: Array

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Builds a curve from (argument, seconds) in any order; repeats count as their median."""
        groups: dict[float, list[float]] = {}
        for x, y in points:
            groups.setdefault(float(x), []).append(y)
        xs = sorted(groups)
        return cls(np.array(xs), np.array([float(np.median(groups[x])) for x in xs]))

    def at(self, x: Array) -> Array:
        """Returns the seconds at every argument, in the shape of ``x``."""
        inside = np.interp(x, self.x, self.y)
        beyond = np.maximum(np.asarray(x, float) - self.x[-1], 0.0)
        return np.asarray(inside + beyond * self._slope)

    def covers(self, x: float) -> bool:
        """Returns whether an argument lies within the measured range."""
        return bool(self.x[0] <= x <= self.x[-1])

    def holds(self, x: float) -> bool:
        """Returns whether exactly this argument was measured."""
        return bool(np.any(self.x == x))

    def falls(self) -> list[tuple[float, float]]:
        """Returns the pairs of neighbouring arguments between which the time falls."""
        pairs = zip(pairwise(self.x), pairwise(self.y), strict=True)
        return [(float(a), float(b)) for (a, b), (low, high) in pairs if high < low]

    @property
    def _slope(self) -> float:
        """Slope beyond the last point, seconds per unit of the argument."""
        if len(self.x) == 1:
            return float(self.y[0] / self.x[0]) if self.x[0] > 0 else 0.0
        return max(0.0, float((self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2])))


@dataclass(frozen=True)
class Surface:
    """Times over two arguments: one curve over the first per measured value of the second.

    Between two curves, times are linear in the second argument. Curves may have different points;
    on a full grid this is bilinear interpolation. The extrapolation rules of this module apply to
    each argument.
    """

    keys: Array  # second argument of each curve, strictly ascending [k]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float, float]]) -> Surface:
        """Builds a surface from (first argument, second argument, seconds) in any order."""
        groups: dict[float, list[tuple[float, float]]] = {}
        for first, second, y in points:
            groups.setdefault(float(second), []).append((first, y))
        keys = sorted(groups)
        return cls(np.array(keys), tuple(Curve.of(groups[key]) for key in keys))

    def at(self, first: Array, second: Array) -> Array:
        """Returns the seconds at every pair of arguments, which broadcast against each other."""
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
        """Returns whether the pair lies between measured curves and within the range of both."""
        if not self.keys[0] <= second <= self.keys[-1]:
            return False
        return all(curve.covers(first) for curve in self._around(second))

    def holds(self, first: float, second: float) -> bool:
        """Returns whether exactly this pair was measured."""
        return any(
            float(key) == second and curve.holds(first)
            for key, curve in zip(self.keys, self.curves, strict=True)
        )

    def _around(self, second: float) -> tuple[Curve, ...]:
        right = int(np.searchsorted(self.keys, second, side="left"))
        if self.keys[right] == second:
            return (self.curves[right],)
        return self.curves[right - 1], self.curves[right]
