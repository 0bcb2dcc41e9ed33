"""Factors of measured kernels over two arguments, interpolated over the arguments' logarithms.

Beyond the measured range, the factor at its end holds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from afd_planner.cost.interpolate import Array


@dataclass(frozen=True)
class Grid:
    """Logarithms of factors over the logarithms of two arguments.

    keys: second argument of each curve, ascending. curves: (first argument, factor) of each.
    """

    keys: Array
    curves: tuple[tuple[Array, Array], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float, float]]) -> Grid:
        """Builds a grid from (first argument, second argument, factor) in any order."""
        found: dict[float, dict[float, float]] = {}
        for first, second, factor in points:
            found.setdefault(math.log(second), {})[math.log(first)] = math.log(factor)
        curves = []
        for key in sorted(found):
            line = sorted(found[key].items())
            curves.append((np.array([x for x, _ in line]), np.array([y for _, y in line])))
        return cls(np.array(sorted(found)), tuple(curves))

    def at_least_one(self) -> Grid:
        """Returns the grid with all factors below 1 raised to 1."""
        return Grid(self.keys, tuple((x, np.maximum(y, 0.0)) for x, y in self.curves))

    def at(self, first: Array, second: Array | float) -> Array:
        """Returns the factors. second: of the shape of ``first``, or one number for all."""
        x, key = np.log(np.maximum(first, 1e-9)), np.log(np.maximum(second, 1e-9))
        if len(self.keys) == 1:
            return np.asarray(np.exp(np.interp(x, *self.curves[0])))
        left = np.clip(np.searchsorted(self.keys, key, side="right") - 1, 0, len(self.keys) - 2)
        low, high = self.keys[left], self.keys[left + 1]
        share = np.clip((key - low) / (high - low), 0.0, 1.0)
        if np.ndim(key) == 0:  # the other curves take no part
            at_low, at_high = (np.interp(x, *self.curves[index]) for index in (left, left + 1))
        else:
            levels = np.stack([np.interp(x, *curve) for curve in self.curves])
            at_low = np.take_along_axis(levels, left[None], 0)[0]
            at_high = np.take_along_axis(levels, left[None] + 1, 0)[0]
        return np.asarray(np.exp(at_low + share * (at_high - at_low)))

    def one(self, first: float, second: float) -> float:
        """Returns one factor, as :meth:`at` does; numpy is slow for single values."""
        keys, curves = self._lists
        x, key = math.log(max(first, 1e-9)), math.log(max(second, 1e-9))
        if len(keys) == 1:
            return math.exp(_on_curve(x, *curves[0]))
        left = min(max(bisect_right(keys, key) - 1, 0), len(keys) - 2)
        share = (key - keys[left]) / (keys[left + 1] - keys[left])
        low, high = (_on_curve(x, *curve) for curve in curves[left : left + 2])
        return math.exp(low + min(max(share, 0.0), 1.0) * (high - low))

    @cached_property
    def _lists(self) -> tuple[list[float], list[tuple[list[float], list[float]]]]:
        return self.keys.tolist(), [(x.tolist(), y.tolist()) for x, y in self.curves]


def _on_curve(x: float, xs: list[float], ys: list[float]) -> float:
    """Interpolates as numpy.interp does: beyond the ends, their values hold."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    left = bisect_right(xs, x) - 1
    slope = (ys[left + 1] - ys[left]) / (xs[left + 1] - xs[left])
    return ys[left] + slope * (x - xs[left])


@dataclass(frozen=True)
class Factors:
    """Grids by tensor parallelism, ascending; without any, every factor is 1."""

    grids: tuple[tuple[int, Grid], ...] = ()

    def at(self, tp: Array | float, first: Array, second: Array | float) -> Array:
        """Returns the factors; the arguments broadcast."""
        if np.ndim(tp) == 0 and self.grids:
            return self._nearest(float(tp)).at(first, second)
        tp, first, second = np.broadcast_arrays(
            *(np.asarray(value, dtype=np.float64) for value in (tp, first, second))
        )
        out = np.ones(first.shape)
        for value in np.unique(tp) if self.grids else ():
            here = tp == value
            out[here] = self._nearest(float(value)).at(first[here], second[here])
        return out

    def one(self, tp: int, first: float, second: float) -> float:
        """Returns one factor."""
        return self._nearest(tp).one(first, second) if self.grids else 1.0

    def _nearest(self, tp: float) -> Grid:
        return min(self.grids, key=lambda pair: abs(math.log(pair[0] / tp)))[1]


NONE = Factors()
