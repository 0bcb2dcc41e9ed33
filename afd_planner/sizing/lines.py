"""The cost model's stage times as straight lines in the number of rows, for many units at once.

:mod:`afd_planner.cost.disaggregated` prices one shape at a time, but a search prices tens of
thousands. This module evaluates the cost model at two row counts per kind of pool, which defines
its lines, and then evaluates the lines on arrays. It contains no second model; tests compare both
on random shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afd_planner.cost.disaggregated import rest_seconds
from afd_planner.cost.interpolate import Array
from afd_planner.cost.shape import Efficiency
from afd_planner.cost.stages import Part, StageTime
from afd_planner.facts.ffn import Ffn, MoeFfn
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.precision import Precision


def stack(items: Sequence[Any]) -> Any:
    """Returns an object of the items' type whose numbers are arrays [n] over the n ``items``."""
    first = items[0]
    if is_dataclass(first):
        values = {name: stack([vars(item)[name] for item in items]) for name in vars(first)}
        return replace(first, **values)  # type: ignore[type-var]  # an instance, not a class
    if isinstance(first, tuple):
        return tuple(stack(column) for column in zip(*items, strict=True))
    return first if isinstance(first, str) else np.array(items, dtype=np.float64)


def take(item: Any, which: NDArray[np.intp]) -> Any:
    """Returns ``item``, a result of ``stack``, with every array indexed by ``which``."""
    if is_dataclass(item):
        values = {name: take(value, which) for name, value in vars(item).items()}
        return replace(item, **values)  # type: ignore[type-var]  # an instance, not a class
    if isinstance(item, tuple):
        return tuple(take(value, which) for value in item)
    return item if isinstance(item, str) else item[which]


@dataclass(frozen=True)
class Line:
    """``base + slope * rows``, seconds. Both are numbers, or arrays after ``stack``."""

    base: float | Array
    slope: float | Array

    def at(self, rows: Array) -> Array:
        return self.base + self.slope * rows


def line_through(at_one: float, at_two: float) -> Line:
    """Returns the line with these values at 1 and 2 rows."""
    return Line(2 * at_one - at_two, at_two - at_one)


def _mean(lines: Sequence[Line], weights: Sequence[float]) -> Line:
    return Line(
        sum(w * line.base for w, line in zip(weights, lines, strict=True)),
        sum(w * line.slope for w, line in zip(weights, lines, strict=True)),
    )


@dataclass(frozen=True)
class PartLines:
    """One roofline: arithmetic time and memory time, each a line in rows."""

    name: str
    compute: Line
    memory: Line

    @staticmethod
    def of(one: Part, two: Part) -> PartLines:
        return PartLines(
            one.name,
            line_through(one.compute_s, two.compute_s),
            line_through(one.memory_s, two.memory_s),
        )

    def at(self, rows: Array) -> Array:
        return np.maximum(self.compute.at(rows), self.memory.at(rows))


@dataclass(frozen=True)
class StageLines:
    """An attention stage whose parts and link time are lines in rows (sequences)."""

    parts: tuple[PartLines, ...]
    link: Line
    overhead_s: float

    @staticmethod
    def of(one: StageTime, two: StageTime) -> StageLines:
        """Builds the lines from the stage at 1 and at 2 rows."""
        parts = [PartLines.of(*pair) for pair in zip(one.parts, two.parts, strict=True)]
        return StageLines(tuple(parts), line_through(one.link_s, two.link_s), one.overhead_s)

    @staticmethod
    def mean(stages: Sequence[StageLines], weights: Sequence[float]) -> StageLines:
        """Returns the weighted mean of stages that differ in context, for a mixed batch."""
        parts = []
        for same in zip(*(stage.parts for stage in stages), strict=True):
            compute = _mean([part.compute for part in same], weights)
            memory = _mean([part.memory for part in same], weights)
            parts.append(PartLines(same[0].name, compute, memory))
        link = _mean([stage.link for stage in stages], weights)
        return StageLines(tuple(parts), link, stages[0].overhead_s)

    def at(self, rows: Array, factors: Mapping[str, Array] | None = None) -> Array:
        """Returns the seconds. factors: of measured kernels, by the name of the part."""
        seconds = self.link.at(rows) + self.overhead_s
        for part in self.parts:
            factor = (factors or {}).get(part.name)
            seconds = seconds + (part.at(rows) if factor is None else part.at(rows) * factor)
        return seconds


@dataclass(frozen=True)
class ExpertLines:
    """One FFN layer on one GPU of a pool. ``rows`` are the tokens of the whole pool.

    Attributes:
        per_pair: Arithmetic per row that grows with the imbalance, seconds.
        per_row: Arithmetic per row that does not, seconds.
        weights_s: Seconds to read all routed experts that the GPU holds.
        fixed_s: Seconds to read shared or dense weights.
        pair_s: Seconds of activation traffic per row.
    """

    per_pair: float
    per_row: float
    weights_s: float
    fixed_s: float
    pair_s: float
    link: Line
    overhead_s: float

    @staticmethod
    def of(ffn: Ffn, one: StageTime, two: StageTime, uneven: StageTime) -> ExpertLines:
        """Builds the lines from the stage at 1 row, 2 rows, and 1 row with an imbalance of 2.

        The FFN must be the last part of the stage.
        """
        first, second, third = one.parts[-1], two.parts[-1], uneven.parts[-1]
        per_pair = third.compute_s - first.compute_s
        pair_s = third.memory_s - first.memory_s
        grows = second.memory_s - first.memory_s - pair_s
        share, more = experts_used(ffn, np.array([1.0, 2.0]))
        weights_s = grows / (more - share) if more > share else 0.0
        if not isinstance(ffn, MoeFfn):
            pair_s = grows
        return ExpertLines(
            per_pair=per_pair,
            per_row=first.compute_s - per_pair,
            weights_s=weights_s,
            fixed_s=first.memory_s - weights_s * share - pair_s,
            pair_s=pair_s,
            link=line_through(one.link_s, two.link_s),
            overhead_s=one.overhead_s,
        )

    def at(self, rows: Array, used: Array, imbalance: Array, reads: float | Array = 1.0) -> Array:
        """Returns the seconds, excluding link and overhead.

        Args:
            rows: Rows of the whole pool.
            used: ``experts_used`` of these rows.
            imbalance: Rows of the busiest expert group over the mean, at least 1.
            reads: Weight reads charged to a micro-batch: 1, or less to find the cost of re-reading.
        """
        compute = rows * (self.per_pair * imbalance + self.per_row)
        weights = (self.weights_s * used + self.fixed_s) * reads
        return np.maximum(compute, weights + self.pair_s * imbalance * rows)


def experts_used(ffn: Ffn, rows: Array) -> Array:
    """Returns the share of routed experts that ``rows`` rows use (``MoeFfn.expected_experts``)."""
    if not isinstance(ffn, MoeFfn):
        return np.ones_like(rows)
    return 1.0 - (1.0 - ffn.top_k / ffn.experts) ** rows


@dataclass(frozen=True)
class RestLines:
    """``rest_seconds`` as lines: roofline of the LM head, traffic per token, fixed part."""

    head: PartLines
    moved: float
    fixed_s: float

    @staticmethod
    def of(
        model: ModelSpec,
        accelerator: Accelerator,
        precision: Precision,
        tp: int,
        efficiency: Efficiency,
    ) -> RestLines:
        def at(rows: float) -> float:
            return rest_seconds(model, accelerator, rows, precision, tp, efficiency)

        moved = at(1.0) - at(0.0)  # few rows: the LM head is bound by memory
        steep = (at(2e9) - at(1e9)) / 1e9  # many rows: bound by compute
        fixed = efficiency.step_overhead_s
        head = PartLines("head", Line(0.0, steep - moved), Line(at(0.0) - fixed, 0.0))
        return RestLines(head, moved, fixed)

    def at(self, rows: Array, factor: Array | float = 1.0) -> Array:
        """Returns the seconds. factor: of a measured LM head and sampling."""
        return (self.head.at(rows) + self.moved * rows) * factor + self.fixed_s
