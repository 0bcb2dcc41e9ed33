"""The best xAyF plan and the best colocated plan within a service level and a budget.

``Spaces`` prices every unit of a request once; its methods then answer for any TPOT, GPU budget or
relief in milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from afd.planner.cost.disaggregated import usd_per_million_tokens
from afd.planner.cost.shape import AfdShape, ColocatedShape, Pool
from afd.planner.cost.stages import AfdStages
from afd.planner.sizing.colocated_space import ColocatedBlock, colocated_blocks
from afd.planner.sizing.context import ContextMix
from afd.planner.sizing.lines import Array
from afd.planner.sizing.plan import Constraint, Operating
from afd.planner.sizing.request import Request
from afd.planner.sizing.space import NONE, Block, FfnTables, Relief, blocks
from afd.planner.sizing.unit_cost import afd_point, binding_afd, binding_colocated

TIE = 1e-6
"""Scores closer than this share are equal; the simpler plan wins."""


@dataclass(frozen=True)
class Limits:
    """What varies over one space. gpus: at hand, None for any number."""

    tpot_s: float
    gpus: int | None


@dataclass(frozen=True)
class Best:
    """The best unit of one block.

    score: tokens/s of all copies, or tokens/s (those asked for, where a rate is) per USD and hour.
    tokens_per_s: of one unit.
    """

    score: float
    block: Block | ColocatedBlock
    index: int
    rows: float
    copies: int
    tokens_per_s: float

    @property
    def per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens_per_s / float(self.block.gpus[self.index])

    @property
    def per_usd(self) -> float:
        """Tokens per USD."""
        return self.tokens_per_s * 3600 / float(self.block.price[self.index])


class Spaces:
    """All units of one request, xAyF and colocated."""

    def __init__(self, request: Request, tables: FfnTables | None = None) -> None:
        self.request = request
        self._tables = tables if tables is not None else {}
        self.afd = blocks(request, self._tables)
        self.colocated = colocated_blocks(request)
        self._afd: dict[tuple[Limits, Relief], Best | None] = {}
        self._colocated: dict[Limits, Best | None] = {}

    def at_context(self, context: ContextMix) -> Spaces:
        """The same question for other contexts; what does not depend on them is kept."""
        return Spaces(replace(self.request, context=context), self._tables)

    @property
    def limits(self) -> Limits:
        return Limits(self.request.tpot_s, self.request.gpus)

    def best_afd(self, limits: Limits, relief: Relief = NONE) -> Best | None:
        """Most tokens (or fewest USD per token); ties: exact wire, fewer GPUs, less depth."""
        key = (limits, relief)
        if key not in self._afd:
            self._afd[key] = self._search_afd(limits, relief)
        return self._afd[key]

    def best_colocated(self, limits: Limits) -> Best | None:
        """Most tokens (or fewest USD per token) without disaggregation."""
        if limits not in self._colocated:
            self._colocated[limits] = self._search_colocated(limits)
        return self._colocated[limits]

    def _search_afd(self, limits: Limits, relief: Relief) -> Best | None:
        best: Best | None = None
        for block in self.afd:
            keep = block.gpus <= (limits.gpus or math.inf)
            if not keep.any():
                continue
            inside = block.picked(keep)
            rows = inside.rows(limits.tpot_s, relief)
            rate = inside.tokens_per_s(rows, relief)
            order = (inside.gpus, inside.depth, inside.x)
            found = self._pick(inside, rows, rate, limits, order)
            best = _better(best, found)
        return best

    def _search_colocated(self, limits: Limits) -> Best | None:
        best: Best | None = None
        for block in self.colocated:
            rows = block.rows(limits.tpot_s)
            rows = np.where(block.gpus <= (limits.gpus or math.inf), rows, 0.0)
            rate = block.tokens_per_s(rows)
            order = (block.gpus, block.micro_batches, block.tp)
            best = _better(best, self._pick(block, rows, rate, limits, order))
        return best

    def _pick(
        self,
        block: Block | ColocatedBlock,
        rows: Array,
        rate: Array,
        limits: Limits,
        order: tuple[Array, ...],
    ) -> Best | None:
        if not np.any(rate > 0):
            return None
        copies = self._copies(block.gpus, rate, limits)
        if self.request.objective == "tokens":
            score = copies * rate
        else:
            wanted = self.request.tokens_per_s
            useful = rate if wanted is None else wanted / np.maximum(copies, 1)
            score = np.where(copies > 0, useful / block.price, 0.0)
        top = score.max()
        if top <= 0:
            return None
        tied = np.flatnonzero(score >= top * (1 - TIE))
        index = int(tied[np.lexsort([keys[tied] for keys in reversed(order)])[0]])
        return Best(
            float(score[index]),
            block,
            index,
            float(rows[index]),
            int(copies[index]),
            float(rate[index]),
        )

    def _copies(self, gpus: Array, rate: Array, limits: Limits) -> Array:
        """Units that the budget holds, or that the target needs."""
        if self.request.tokens_per_s is not None:
            return np.where(
                rate > 0, np.ceil(self.request.tokens_per_s / np.maximum(rate, 1e-9)), 0
            )
        if limits.gpus is None:
            return np.ones_like(gpus)
        return np.floor(limits.gpus / gpus)

    def fastest_tpot(self, gpus: int | None) -> float:
        """Smallest TPOT in seconds that any unit of up to ``gpus`` reaches; inf where none fits."""
        fastest = math.inf
        for block in (*self.afd, *self.colocated):
            micro_batches = block.depth if isinstance(block, Block) else block.micro_batches
            capacity = block.attention.kv_rows if isinstance(block, Block) else block.kv_rows
            keep = (block.gpus <= (gpus or math.inf)) & (capacity >= micro_batches)
            if keep.any():
                step = block.step(np.ones_like(block.gpus))[keep]
                fastest = min(fastest, float(step.min()) / self.request.accepted)
        return fastest

    def smallest(self, *, disaggregated: bool) -> int | None:
        """Fewest GPUs that hold the model and one longest request; None where nothing does."""
        sizes = [block.gpus.min() for block in (self.afd if disaggregated else self.colocated)]
        return int(min(sizes)) if sizes else None


def _better(first: Best | None, second: Best | None) -> Best | None:
    if first is None or (second is not None and second.score > first.score * (1 + TIE)):
        return second
    return first


def afd_operating(best: Best) -> tuple[Operating, AfdStages]:
    """The unit priced by the cost model itself, and its stages."""
    block = best.block
    assert isinstance(block, Block)
    request, i = block.request, best.index
    which = int(block.which[i])
    attention = Pool(
        block.attention.accelerator, int(block.x[i]), block.attention.gpus, block.attention.tp
    )
    ffn = Pool(
        block.ffn.accelerator,
        int(block.ffn.instances[which]),
        block.ffn.gpus,
        int(block.ffn.tp[which]),
    )
    shape, stages, measured = afd_point(
        request, attention, ffn, int(block.depth[i]), best.rows * attention.groups, block.wire
    )
    full = best.rows + 1 > block.attention.kv_rows / block.depth[i]
    binding = _full(block.attention.weights_share) if full else binding_afd(stages, shape.depth)
    return _operating(request, best, shape, shape.total_gpus, binding, measured), stages


def colocated_operating(best: Best) -> Operating:
    block = best.block
    assert isinstance(block, ColocatedBlock)
    request, i = block.request, best.index
    micro_batches = int(block.micro_batches[i])
    shape = ColocatedShape(
        block.accelerator,
        int(block.gpus[i]),
        int(block.tp[i]),
        int(block.ep[i]),
        best.rows * float(block.groups[i]) * micro_batches,
        request.context.mean,
        replace(request.precision, wire="fp8"),
        overlap=micro_batches == 2,
        draft=request.positions - 1,
    )
    full = best.rows + 1 > block.kv_rows[i] / micro_batches
    binding = _full(float(block.weights_share[i])) if full else binding_colocated(request, shape)
    return _operating(request, best, shape, shape.gpus, binding, ())


def _full(weights_share: float) -> Constraint:
    """What a full cache is due to: requests, or weights that leave it less than half."""
    return Constraint.MEMORY_FIT if weights_share > 0.5 else Constraint.KV_CAPACITY


def _operating(
    request: Request,
    best: Best,
    shape: AfdShape | ColocatedShape,
    gpus: int,
    binding: Constraint,
    measured: tuple[str, ...],
) -> Operating:
    batch = shape.rows if isinstance(shape, ColocatedShape) else shape.batch
    step = batch * request.accepted / best.tokens_per_s
    price = best.copies * shape.price_per_hour
    tokens = best.copies * best.tokens_per_s
    return Operating(
        shape=shape,
        copies=best.copies,
        step_s=step,
        tpot_s=step / request.accepted,
        tokens_per_s=tokens,
        gpus=best.copies * gpus,
        price_per_hour=price,
        usd_per_million=usd_per_million_tokens(price, tokens),
        binding=binding,
        measured=measured,
    )
