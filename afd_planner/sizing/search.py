"""Finds the best xAyF plan and the best colocated plan within a TPOT limit and a GPU budget.

``Search`` prices every unit of a request once. Its methods then search under any TPOT, budget or
relief within milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from afd_planner.cost.disaggregated import usd_per_million_tokens
from afd_planner.cost.interpolate import Array
from afd_planner.cost.shape import AfdShape, ColocatedShape, Pool, Routing
from afd_planner.cost.stages import AfdStages
from afd_planner.sizing.afd_units import NO_RELIEF, AfdUnits, FfnTables, Relief, afd_units
from afd_planner.sizing.colocated_units import ColocatedUnits, colocated_units
from afd_planner.sizing.context import ContextMix
from afd_planner.sizing.imbalance import ExpertSpread
from afd_planner.sizing.mix import Fill, fill
from afd_planner.sizing.plan import Constraint, OperatingPoint
from afd_planner.sizing.request import Request
from afd_planner.sizing.unit_cost import afd_point, binding_afd, binding_colocated

TIE = 1e-6
"""Scores whose relative difference is smaller count as equal; the simpler plan wins."""


@dataclass(frozen=True)
class Limits:
    """Limits of one search. ``gpus``: available GPUs, None for any number."""

    tpot_s: float
    gpus: int | None


@dataclass(frozen=True)
class Best:
    """The best of a set of units, and the number of copies to run.

    Attributes:
        score: The objective: tokens/s of the whole plan; or tokens/s per USD/hour, where tokens
            beyond the requested rate do not count.
        index: Position of the unit in ``units``.
        rows: Rows per data-parallel group and micro-batch.
        tokens_per_s: Of one copy.
        others: Other units of the plan, on GPUs that no further copy fits into.
    """

    score: float
    units: AfdUnits | ColocatedUnits
    index: int
    rows: float
    copies: int
    tokens_per_s: float
    others: tuple[Best, ...] = ()

    def total(self, of_one: Callable[[Best], float]) -> float:
        """Returns the sum of ``of_one``, a quantity of one unit, over all units of the plan."""
        return sum(best.copies * of_one(best) for best in (self, *self.others))

    @property
    def rate(self) -> float:
        """Tokens per second of the whole plan."""
        return self.total(lambda best: best.tokens_per_s)

    @property
    def gpus(self) -> int:
        """GPUs of the whole plan."""
        return round(self.total(lambda best: float(best.units.gpus[best.index])))

    @property
    def price(self) -> float:
        """USD per hour of the whole plan."""
        return self.total(lambda best: float(best.units.price[best.index]))

    @property
    def per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.rate / self.gpus

    @property
    def per_usd(self) -> float:
        """Tokens per USD."""
        return self.rate * 3600 / self.price


class Search:
    """All units of one request, xAyF and colocated."""

    def __init__(self, request: Request, tables: FfnTables | None = None) -> None:
        self.request = request
        self._tables = tables if tables is not None else {}
        self.afd = afd_units(request, self._tables)
        self.colocated = colocated_units(request)
        self._afd: dict[tuple[Limits, Relief], Best | None] = {}
        self._colocated: dict[Limits, Best | None] = {}
        self._sizes: dict[Limits, dict[int, Best]] = {}

    def at_context(self, context: ContextMix) -> Search:
        """Returns the search for other contexts; it reuses what does not depend on them."""
        return Search(replace(self.request, context=context), self._tables)

    def with_spread(self, spread: ExpertSpread) -> Search:
        """Returns the search for other expert loads, over the same units."""
        other = copy(self)
        other.request = replace(self.request, spread=spread)
        other.afd = [replace(units, request=other.request) for units in self.afd]
        other.colocated = [replace(units, request=other.request) for units in self.colocated]
        other._afd, other._colocated, other._sizes = {}, {}, {}
        return other

    @property
    def limits(self) -> Limits:
        return Limits(self.request.tpot_s, self.request.gpus)

    def best_afd(self, limits: Limits, relief: Relief = NO_RELIEF) -> Best | None:
        """Returns the xAyF unit with the best score. Ties: exact wire, fewer GPUs, less depth."""
        key = (limits, relief)
        if key not in self._afd:
            self._afd[key] = self._search_afd(limits, relief)
        return self._afd[key]

    def best_colocated(self, limits: Limits) -> Best | None:
        """Returns the colocated unit with the best score."""
        if limits not in self._colocated:
            self._colocated[limits] = self._search_colocated(limits)
        return self._colocated[limits]

    def _search_afd(self, limits: Limits, relief: Relief) -> Best | None:
        best: Best | None = None
        sizes: dict[int, Best] = {}
        for units in self.afd:
            keep = units.gpus <= (limits.gpus or math.inf)
            if not keep.any():
                continue
            inside = units.picked(keep)
            rows = inside.rows(limits.tpot_s, relief)
            rate = inside.tokens_per_s(rows, relief)
            order = (inside.gpus, inside.depth, inside.x, inside.redundant)
            if self._fills:
                _best_per_size(sizes, inside, rows, rate, order)
            else:
                best = _better(best, self._pick(inside, rows, rate, limits, order))
        if self._fills:
            return self._fill_afd(sizes, limits)
        return best

    def _search_colocated(self, limits: Limits) -> Best | None:
        if self._fills:
            sizes, gpus = self._colocated_sizes(limits), limits.gpus or 0
            return _plan_of(sizes, fill(_rates(sizes), gpus))
        best: Best | None = None
        for units, rows, rate, order in self._colocated_rates(limits):
            best = _better(best, self._pick(units, rows, rate, limits, order))
        return best

    @property
    def _fills(self) -> bool:
        """Whether a plan fills its GPUs with units of several kinds: for most tokens/s."""
        return self.request.objective == "tokens"

    def _colocated_rates(
        self, limits: Limits
    ) -> Iterator[tuple[ColocatedUnits, Array, Array, tuple[Array, ...]]]:
        for units in self.colocated:
            rows = units.rows(limits.tpot_s)
            rows = np.where(units.gpus <= (limits.gpus or math.inf), rows, 0.0)
            order = (units.gpus, units.micro_batches, units.tp, units.redundant)
            yield units, rows, units.tokens_per_s(rows), order

    def _colocated_sizes(self, limits: Limits) -> dict[int, Best]:
        """Returns the best colocated unit of each size."""
        if limits not in self._sizes:
            sizes: dict[int, Best] = {}
            for units, rows, rate, order in self._colocated_rates(limits):
                _best_per_size(sizes, units, rows, rate, order)
            self._sizes[limits] = sizes
        return self._sizes[limits]

    def _fill_afd(self, sizes: dict[int, Best], limits: Limits) -> Best | None:
        """Returns the best plan of xAyF units.

        Where a unit is at least as good per GPU as the colocated plan, as many copies as fit run,
        or one less, and the GPUs that are left run what is best on them, xAyF or colocated. Other
        plans have xAyF units only: with colocated ones they would hide how much xAyF loses.
        """
        gpus = limits.gpus or 0
        best = _plan_of(sizes, fill(_rates(sizes), gpus))
        colocated = self.best_colocated(limits)
        needed = colocated.score / gpus if colocated else 0.0
        mixed = dict(self._colocated_sizes(limits))
        for size, unit in sizes.items():
            mixed[size] = _better(mixed.get(size), unit) or unit
        rest: Fill | None = None
        for size, unit in sorted(sizes.items()):
            if unit.tokens_per_s / size < needed:
                continue
            if rest is None:
                rest = Fill(_rates(mixed), max(sizes) - 1)
            most = gpus // size
            for copies, left in ((most, gpus % size), (most - 1, size - 1)):
                score = copies * unit.tokens_per_s + float(rest.value[left])
                if copies > 0 and (best is None or score > best.score * (1 + TIE)):
                    others = [replace(mixed[n], copies=k) for n, k in rest.counts(left).items()]
                    best = replace(unit, score=score, copies=copies, others=tuple(others))
        return best

    def _pick(
        self,
        units: AfdUnits | ColocatedUnits,
        rows: Array,
        rate: Array,
        limits: Limits,
        order: tuple[Array, ...],
    ) -> Best | None:
        if not np.any(rate > 0):
            return None
        copies = self._copies(units.gpus, rate, limits)
        if self.request.objective == "tokens":
            score = copies * rate
        else:
            wanted = self.request.tokens_per_s
            useful = rate if wanted is None else wanted / np.maximum(copies, 1)
            score = np.where(copies > 0, useful / units.price, 0.0)
        top = score.max()
        if top <= 0:
            return None
        tied = np.flatnonzero(score >= top * (1 - TIE))
        index = int(tied[np.lexsort([keys[tied] for keys in reversed(order)])[0]])
        return Best(
            float(score[index]),
            units,
            index,
            float(rows[index]),
            int(copies[index]),
            float(rate[index]),
        )

    def _copies(self, gpus: Array, rate: Array, limits: Limits) -> Array:
        """Returns the copies that the budget holds, or that the requested rate needs."""
        if self.request.tokens_per_s is not None:
            return np.where(
                rate > 0, np.ceil(self.request.tokens_per_s / np.maximum(rate, 1e-9)), 0
            )
        if limits.gpus is None:
            return np.ones_like(gpus)
        return np.floor(limits.gpus / gpus)

    def fastest_tpot(self, gpus: int | None) -> float:
        """Returns the smallest TPOT, seconds, of any unit of up to ``gpus`` GPUs; inf if none."""
        fastest = math.inf
        every: list[AfdUnits | ColocatedUnits] = [*self.afd, *self.colocated]
        for units in every:
            micro_batches = units.depth if isinstance(units, AfdUnits) else units.micro_batches
            capacity = units.capacity if isinstance(units, AfdUnits) else units.kv_rows
            keep = (units.gpus <= (gpus or math.inf)) & (capacity >= micro_batches)
            if keep.any():
                step = units.step(np.ones_like(units.gpus))[keep]
                fastest = min(fastest, float(step.min()) / self.request.accepted)
        return fastest

    def smallest(self, *, disaggregated: bool) -> int | None:
        """Returns the fewest GPUs that hold the model and one longest request, or None."""
        sizes = [
            float(units.gpus[held].min())
            for units in (self.afd if disaggregated else self.colocated)
            for held in ((units.capacity if isinstance(units, AfdUnits) else units.kv_rows) > 0,)
            if held.any()
        ]
        return int(min(sizes)) if sizes else None


def _best_per_size(
    sizes: dict[int, Best],
    units: AfdUnits | ColocatedUnits,
    rows: Array,
    rate: Array,
    order: tuple[Array, ...],
) -> None:
    """Adds the best unit of each size to ``sizes``. ``order``: what decides between equal ones."""
    good = np.flatnonzero(rate > 0)
    coarse = np.floor(np.log(rate[good]) / TIE)
    ranked = good[np.lexsort((*(key[good] for key in reversed(order)), -coarse, units.gpus[good]))]
    gpus = units.gpus[ranked]
    for index in ranked[np.flatnonzero(np.diff(gpus, prepend=-1.0))]:
        size, tokens = int(units.gpus[index]), float(rate[index])
        found = Best(tokens, units, int(index), float(rows[index]), 1, tokens)
        sizes[size] = _better(sizes.get(size), found) or found


def _rates(sizes: dict[int, Best]) -> dict[int, float]:
    return {size: best.tokens_per_s for size, best in sizes.items()}


def _plan_of(sizes: dict[int, Best], counts: Counter[int]) -> Best | None:
    """Returns the plan with ``counts`` units of each size; the one with most GPUs comes first."""
    ranked = sorted(counts, key=lambda size: -size * counts[size])
    units = [replace(sizes[size], copies=counts[size]) for size in ranked]
    if not units:
        return None
    whole = replace(units[0], others=tuple(units[1:]))
    return replace(whole, score=whole.rate)


def _better(first: Best | None, second: Best | None) -> Best | None:
    if first is None or (second is not None and second.score > first.score * (1 + TIE)):
        return second
    return first


def afd_operating(best: Best) -> tuple[OperatingPoint, AfdStages]:
    """Prices a unit found by the search with the cost model; returns it with its stages."""
    units = best.units
    assert isinstance(units, AfdUnits)
    request, i = units.request, best.index
    which = int(units.which[i])
    attention = Pool(
        units.attention.accelerator, int(units.x[i]), units.attention.gpus, units.attention.tp
    )
    ffn = Pool(
        units.ffn.accelerator,
        int(units.ffn.instances[which]),
        units.ffn.gpus,
        int(units.ffn.tp[which]),
    )
    shape, stages, measured = afd_point(
        request,
        attention,
        ffn,
        int(units.depth[i]),
        best.rows * attention.groups,
        units.wire,
        int(units.redundant[i]),
    )
    full = best.rows + 1 > units.capacity[i] / units.depth[i]
    binding = _full(units.attention.weights_share) if full else binding_afd(stages, shape.depth)
    return _operating(request, best, shape, binding, measured), stages


def colocated_operating(best: Best) -> OperatingPoint:
    """Prices a colocated unit found by the search with the cost model."""
    units = best.units
    assert isinstance(units, ColocatedUnits)
    request, i = units.request, best.index
    micro_batches = int(units.micro_batches[i])
    shape = ColocatedShape(
        units.accelerator,
        int(units.gpus[i]),
        int(units.tp[i]),
        int(units.ep[i]),
        best.rows * float(units.groups[i]) * micro_batches,
        request.context.mean,
        request.exchange_precision,
        Routing(redundant=int(units.redundant[i])),
        overlap=micro_batches == 2,
        draft=request.positions - 1,
    )
    full = best.rows + 1 > units.kv_rows[i] / micro_batches
    binding = _full(float(units.weights_share[i])) if full else binding_colocated(request, shape)
    return _operating(request, best, shape, binding, ())


def _full(weights_share: float) -> Constraint:
    """Returns why the cache is full: long requests, or weights that take most of the memory."""
    return Constraint.MEMORY_FIT if weights_share > 0.5 else Constraint.KV_CAPACITY


def _operating(
    request: Request,
    best: Best,
    shape: AfdShape | ColocatedShape,
    binding: Constraint,
    measured: tuple[str, ...],
) -> OperatingPoint:
    batch = shape.rows if isinstance(shape, ColocatedShape) else shape.batch
    step = batch * request.accepted / best.tokens_per_s
    return OperatingPoint(
        shape=shape,
        copies=best.copies,
        step_s=step,
        tpot_s=step / request.accepted,
        tokens_per_s=best.rate,
        gpus=best.gpus,
        price_per_hour=best.price,
        usd_per_million=usd_per_million_tokens(best.price, best.rate),
        binding=binding,
        measured=measured,
        others=tuple(_other_operating(other) for other in best.others),
    )


def _other_operating(best: Best) -> OperatingPoint:
    return afd_operating(best)[0] if isinstance(best.units, AfdUnits) else colocated_operating(best)
