"""The same request without disaggregation: DP or TP attention with EP or TP experts, as arrays.

A unit is one group of GPUs that holds the whole model; a plan runs copies of it. Priced by
:mod:`afd.planner.cost.colocated`, read off as lines in rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from afd.planner.cost.budget import colocated_memory, kv_capacity_rows
from afd.planner.cost.colocated import ColocatedLayer, colocated_step
from afd.planner.cost.shape import ColocatedShape, Routing
from afd.planner.cost.stages import StageTime
from afd.planner.facts.ffn import MoeFfn
from afd.planner.facts.hardware import Accelerator
from afd.planner.sizing.lines import (
    Array,
    ExpertLines,
    Line,
    RestLines,
    StageLines,
    experts_used,
    line_through,
    stack,
)
from afd.planner.sizing.request import MAX_UNIT_GPUS, Request
from afd.planner.sizing.space import MOST_ROWS
from afd.planner.sizing.units import NARROWEST

UNEVEN = Routing(imbalance=2.0)


@dataclass(frozen=True)
class ColocatedLayers:
    """One layer group on all units. attention: rows of one data-parallel group (dense layers: with
    their FFN), links inside servers as for even experts. experts, exchange: tokens of the whole
    unit; None for dense layers. uneven_link: seconds per token and unit of imbalance above 1."""

    layers: int
    attention: StageLines
    experts: ExpertLines | None
    exchange: Line | None
    uneven_link: float | Array


@dataclass(frozen=True)
class ColocatedBlock:
    """All units of one accelerator; arrays [n].

    gpus, tp, ep: as in ``ColocatedShape``. micro_batches: 1, or 2 with overlap. kv_rows: sequences
    that the cache of one data-parallel group holds. weights_share: of the usable memory that
    weights take.
    """

    request: Request
    accelerator: Accelerator
    gpus: Array
    tp: Array
    ep: Array
    micro_batches: Array
    kv_rows: Array
    weights_share: Array
    rest: RestLines
    layers: tuple[ColocatedLayers, ...]

    @property
    def price(self) -> Array:
        """USD per hour of one unit."""
        return self.gpus * self.accelerator.price_per_hour

    @property
    def groups(self) -> Array:
        return self.gpus / self.tp

    def step(self, rows: Array) -> Array:
        """Seconds of one decode step with ``rows`` [n] sequences per data-parallel group and
        micro-batch: ``ColocatedStep.seconds`` for all units.

        Measured attention, FFN and rest take the place of modelled ones, as in xAyF plans: a rank
        then does both. The exchange between GPUs stays modelled.
        """
        request = self.request
        all_rows = rows * self.groups * request.positions
        seconds = self._rest(rows * self.micro_batches * request.positions)
        for group, lines in zip(request.model.groups, self.layers, strict=True):
            compute = self._attention(lines, rows)
            exchange = np.zeros_like(rows)
            if lines.experts is not None and isinstance(group.ffn, MoeFfn):
                ffn = group.ffn
                slowest = request.spread.slowest(all_rows, self.ep, ffn.experts, ffn.top_k)
                compute = compute + self._experts(lines, ffn, all_rows, slowest)
                exchange = lines.exchange.base + lines.exchange.slope * all_rows * slowest
            exposed = compute + exchange * (1 - request.efficiency.hidden_exchange)
            period = np.where(
                self.micro_batches == 1,
                compute + exchange,
                self.micro_batches * np.maximum(exposed, exchange),
            )
            seconds = seconds + lines.layers * period
        return seconds

    def _rest(self, tokens: Array) -> Array:
        measured = self.request.measured
        if measured is not None and measured.rest is not None:
            return measured.rest.at(tokens)
        return self.rest.at(tokens)

    def _attention(self, lines: ColocatedLayers, rows: Array) -> Array:
        request = self.request
        if request.measured is not None and request.measured.attention is not None:
            contexts = np.full_like(rows, request.context.mean)
            return request.measured.attention.at(rows * request.positions, contexts)
        return lines.attention.at(rows)

    def _experts(self, lines: ColocatedLayers, ffn: MoeFfn, tokens: Array, slowest: Array) -> Array:
        """Experts of one layer, with what links inside servers take longer for uneven loads."""
        measured = self.request.measured
        if measured is not None and measured.ffn is not None:
            known = measured.ffn_experts
            held = ffn.experts / self.ep if known else measured.experts_line(None)
            return measured.ffn.at(tokens, np.broadcast_to(held, tokens.shape))
        assert lines.experts is not None
        seconds = lines.experts.at(tokens, experts_used(ffn, tokens), slowest)
        return seconds + lines.uneven_link * tokens * (slowest - 1)

    def rows(self, tpot_s: float) -> Array:
        """Most rows [n] per data-parallel group and micro-batch within ``tpot_s``; 0: none."""
        limit = tpot_s * self.request.accepted
        low = np.zeros_like(self.gpus)
        high = np.floor(np.minimum(self.kv_rows / self.micro_batches, MOST_ROWS))
        while np.any(low < high):
            middle = np.ceil((low + high) / 2)
            good = self.step(np.maximum(middle, 1)) <= limit
            low = np.where(good, np.minimum(middle, high), low)
            high = np.where(good, high, np.maximum(middle - 1, low))
        return low

    def tokens_per_s(self, rows: Array) -> Array:
        """Output tokens per second [n] of one unit at ``rows``; 0 where there are none."""
        step = self.step(np.maximum(rows, 1))
        return self.micro_batches * rows * self.groups * self.request.accepted / step


def colocated_blocks(request: Request) -> list[ColocatedBlock]:
    """Units of every accelerator of the request, each kind on its own."""
    kinds = {a.name: a for a in (*request.attention, *request.ffn)}
    found = (_block(request, accelerator) for accelerator in kinds.values())
    return [block for block in found if block is not None]


def _sizes(per_server: int) -> list[int]:
    """GPUs per unit: powers of two within a server, then whole servers, coarser as they grow."""
    inside = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < per_server]
    servers = [*range(1, 9), 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 64]
    return inside + [per_server * n for n in servers if per_server * n <= MAX_UNIT_GPUS]


def _block(request: Request, accelerator: Accelerator) -> ColocatedBlock | None:
    shapes = [
        shape
        for gpus in _sizes(accelerator.gpus_per_server)
        for shape in _shapes(request, accelerator, gpus)
    ]
    kept, memory, layers, rests = [], [], [], []
    for shape in shapes:
        capacity = _capacity(request, shape)
        if capacity is None:
            continue
        rest = RestLines.of(
            request.model, accelerator, request.precision, shape.tp, request.efficiency
        )
        for overlap in (False, True):
            if overlap and shape.ep == 1:
                continue  # nothing to hide
            kept.append(replace(shape, overlap=overlap))
            memory.append(capacity)
            layers.append(_layers(request, kept[-1]))
            rests.append(rest)
    if not kept:
        return None
    columns = []
    for column in zip(*layers, strict=True):
        experts = [c.experts for c in column if c.experts is not None]
        exchange = [c.exchange for c in column if c.exchange is not None]
        columns.append(
            ColocatedLayers(
                column[0].layers,
                stack([c.attention for c in column]),
                stack(experts) if experts else None,
                stack(exchange) if exchange else None,
                np.array([c.uneven_link for c in column]),
            )
        )
    return ColocatedBlock(
        request,
        accelerator,
        np.array([s.gpus for s in kept], dtype=np.float64),
        np.array([s.tp for s in kept], dtype=np.float64),
        np.array([s.ep for s in kept], dtype=np.float64),
        np.array([2 if s.overlap else 1 for s in kept], dtype=np.float64),
        *np.array(memory).T,
        stack(rests),
        tuple(columns),
    )


def _shapes(request: Request, accelerator: Accelerator, gpus: int) -> list[ColocatedShape]:
    model = request.model
    moe = [g.ffn for g in model.groups if isinstance(g.ffn, MoeFfn)]
    narrowest = min((f.intermediate for f in moe), default=0)
    most_experts = min((f.experts for f in moe), default=1)
    server = min(gpus, accelerator.gpus_per_server)
    found = []
    for tp in dict.fromkeys((1, server)):
        for expert_tp in dict.fromkeys((1, server)):
            ep = gpus // expert_tp if moe else 1
            if gpus % tp or gpus % expert_tp or ep > most_experts:
                continue
            if not moe and tp != gpus:
                continue  # a dense model beyond one TP group is copies of it
            if expert_tp > 1 and narrowest // expert_tp < NARROWEST:
                continue
            if ep == 1 and tp != gpus:
                continue  # experts under TP over all GPUs need one group's rows on all
            found.append(
                ColocatedShape(
                    accelerator,
                    gpus,
                    tp,
                    ep,
                    1.0,
                    request.context.mean,
                    replace(request.precision, wire="fp8"),
                    draft=request.positions - 1,
                )
            )
    return found


def _capacity(request: Request, shape: ColocatedShape) -> tuple[float, float] | None:
    """(``kv_rows``, ``weights_share``); None where weights or the longest request do not fit."""
    use = colocated_memory(request.model, shape, request.efficiency)
    if not use.fits:
        return None

    def capacity(context: float) -> float:
        return kv_capacity_rows(request.model, use, context, request.precision, shape.tp)

    if capacity(request.context.longest) < 1:
        return None
    rows = 1 / request.context.average(lambda length: 1 / capacity(length))
    return rows, use.weights / use.usable


def _layers(request: Request, shape: ColocatedShape) -> list[ColocatedLayers]:
    """Lines of every layer group in rows of one micro-batch, read off ``colocated_step``."""
    micro_batches = 2 if shape.overlap else 1

    def at(
        rows: float, context: float, draft: int = 0, routing: Routing = shape.routing
    ) -> list[ColocatedLayer]:
        step = rows * micro_batches
        asked = replace(shape, rows=step, context=context, draft=draft, routing=routing)
        return list(colocated_step(request.model, asked, request.efficiency).layers)

    lengths, shares = request.context.lengths, request.context.shares
    draft, dp = shape.draft, shape.dp
    by_length = [(at(dp, length, draft), at(2 * dp, length, draft)) for length in lengths]
    one, two, uneven = (at(1, 1), at(2, 1), at(1, 1, routing=UNEVEN))
    found = []
    for index, group in enumerate(request.model.groups):
        moe = isinstance(group.ffn, MoeFfn)
        attention = StageLines.mean(
            [
                StageLines.of(*(_attention_of(layer[index].compute, moe) for layer in pair))
                for pair in by_length
            ],
            shares,
        )
        experts = exchange = None
        if moe:
            stages = (layer[index].compute for layer in (one, two, uneven))
            experts = ExpertLines.of(group.ffn, *stages)
            exchange = line_through(one[index].exchange_s, two[index].exchange_s)
        link = uneven[index].compute.link_s - one[index].compute.link_s
        found.append(ColocatedLayers(len(group.layers), attention, experts, exchange, link))
    return found


def _attention_of(stage: StageTime, moe: bool) -> StageTime:
    """The stage without its experts, which are the last part."""
    return replace(stage, parts=stage.parts[:-1]) if moe else stage
