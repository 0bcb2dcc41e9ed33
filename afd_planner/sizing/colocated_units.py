"""All colocated units that a request may use, as arrays: DP or TP attention, EP or TP experts.

A unit is one group of GPUs that holds the whole model; a plan runs one or more copies of it. Times
are those of :mod:`afd_planner.cost.colocated`, as lines in rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from afd.errors import ConfigError
from afd_planner.cost.budget import colocated_memory, kv_capacity_rows
from afd_planner.cost.colocated import ColocatedLayer, colocated_step
from afd_planner.cost.interpolate import Array
from afd_planner.cost.shape import ColocatedShape, Routing
from afd_planner.cost.stages import StageTime
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import LayerGroup
from afd_planner.sizing.afd_units import MOST_ROWS
from afd_planner.sizing.factors import (
    attention_factors,
    expert_factor,
    head_factor,
    held_fixed_s,
)
from afd_planner.sizing.lines import (
    ExpertLines,
    Line,
    RestLines,
    StageLines,
    experts_used,
    line_through,
    stack,
)
from afd_planner.sizing.pools import NARROWEST, spare_experts
from afd_planner.sizing.request import MAX_UNIT_GPUS, Request


@dataclass(frozen=True)
class ColocatedLayers:
    """One layer group on all units.

    Attributes:
        layers: Number of layers of the group.
        attention: Lines in rows of one data-parallel group, with the FFN of dense layers and the
            time of server-internal links at an even expert load.
        experts, exchange: Lines in tokens of the whole unit; None for dense layers.
        uneven_link: Link seconds per token and per unit of imbalance above 1.
    """

    layers: int
    attention: StageLines
    experts: ExpertLines | None
    exchange: Line | None
    uneven_link: float | Array


@dataclass(frozen=True)
class ColocatedUnits:
    """All units of one accelerator, as arrays [n].

    Attributes:
        gpus, tp, ep: As in ``ColocatedShape``.
        redundant: Copies of experts per expert shard and layer.
        micro_batches: 1, or 2 with overlap.
        kv_rows: Sequences that the cache of one data-parallel group holds.
        weights_share: Share of the usable memory that weights take.
    """

    request: Request
    accelerator: Accelerator
    gpus: Array
    tp: Array
    ep: Array
    redundant: Array
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
        """Returns the seconds [n] of one decode step: ``ColocatedStep.seconds`` for all units.

        ``rows`` [n] are sequences per data-parallel group and micro-batch. Measured times of
        attention, FFN and rest replace modelled ones, as in xAyF plans. The exchange between GPUs
        is always modelled.
        """
        request = self.request
        all_rows = rows * self.groups * request.positions
        seconds = self._rest(rows * self.micro_batches * request.positions)
        for group, lines in zip(request.model.groups, self.layers, strict=True):
            compute = self._attention(group, lines, rows)
            exchange = np.zeros_like(rows)
            if lines.exchange is not None and isinstance(group.ffn, MoeFfn):
                ffn = group.ffn
                slowest = request.spread.slowest(
                    all_rows, self.ep, ffn.experts, ffn.top_k, self.redundant
                )
                compute = compute + self._experts(lines, ffn, all_rows, slowest)
                exchange = lines.exchange.base + lines.exchange.slope * all_rows * slowest
            exposed = compute + exchange * (1 - request.efficiency.hidden_exchange)
            period = np.where(
                self.micro_batches == 1,
                compute + exchange,
                self.micro_batches * np.maximum(exposed, exchange),
            )
            seconds = seconds + lines.layers * period
        return np.maximum(seconds, request.efficiency.host_seconds(rows * self.micro_batches))

    def _rest(self, tokens: Array) -> Array:
        measured = self.request.measured
        if measured is not None and measured.rest is not None:
            return measured.rest.at(tokens)
        return self.rest.at(tokens, head_factor(self.request, self.accelerator, self.tp, tokens))

    def _attention(self, group: LayerGroup, lines: ColocatedLayers, rows: Array) -> Array:
        request = self.request
        if request.measured is not None and request.measured.attention is not None:
            contexts = np.full_like(rows, request.context.mean)
            return request.measured.attention.at(rows * request.positions, contexts)
        factors = attention_factors(request, self.accelerator, group, self.tp, rows)
        return lines.attention.at(rows, factors)

    def _experts(self, lines: ColocatedLayers, ffn: MoeFfn, tokens: Array, slowest: Array) -> Array:
        """Returns the experts of one layer, with the extra link time due to an uneven load."""
        measured = self.request.measured
        if measured is not None and measured.ffn is not None:
            known = measured.ffn_experts
            held = ffn.experts / self.ep if known else measured.experts_line(None)
            return measured.ffn.at(tokens, np.broadcast_to(held, tokens.shape))
        assert lines.experts is not None
        seconds = lines.experts.at(tokens, experts_used(ffn, tokens), slowest)
        factor = expert_factor(
            self.request, self.accelerator, ffn, self.gpus / self.ep, tokens, self.ep
        )
        # The attention lines hold the fixed time of the experts without its factor.
        fixed = self.request.efficiency.ffn_overhead_s
        seconds = seconds * factor + fixed * (factor - 1)
        return seconds + lines.uneven_link * tokens * (slowest - 1)

    def rows(self, tpot_s: float) -> Array:
        """Returns the most rows [n] per data-parallel group and micro-batch within ``tpot_s``.

        With a stated batch, these are its rows, or 0 if they do not fit.
        """
        limit = tpot_s * self.request.accepted
        if self.request.batch is not None and self.request.colocated_layout is not None:
            asked = self.request.batch / (self.micro_batches * self.groups)
            return np.asarray(np.where(asked * self.micro_batches <= self.kv_rows, asked, 0.0))
        low = np.zeros_like(self.gpus)
        high = np.floor(np.minimum(self.kv_rows / self.micro_batches, MOST_ROWS))
        while np.any(low < high):
            middle = np.ceil((low + high) / 2)
            good = self.step(np.maximum(middle, 1)) <= limit
            low = np.where(good, np.minimum(middle, high), low)
            high = np.where(good, high, np.maximum(middle - 1, low))
        return low

    def tokens_per_s(self, rows: Array) -> Array:
        """Returns the output tokens per second [n] of one unit at ``rows``."""
        step = self.step(np.maximum(rows, 1))
        return self.micro_batches * rows * self.groups * self.request.accepted / step


def colocated_units(request: Request) -> list[ColocatedUnits]:
    """Returns the units of each accelerator of the request; units do not mix accelerators."""
    kinds = {a.name: a for a in (*request.attention, *request.ffn)}
    found = (_units(request, accelerator) for accelerator in kinds.values())
    return [units for units in found if units is not None]


def _sizes(per_server: int) -> list[int]:
    """Returns the unit sizes to search: powers of two in a server, then whole servers."""
    inside = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < per_server]
    servers = [*range(1, 9), 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 64]
    return inside + [per_server * n for n in servers if per_server * n <= MAX_UNIT_GPUS]


def _units(request: Request, accelerator: Accelerator) -> ColocatedUnits | None:
    shapes = [
        replace(shape, routing=Routing(redundant=redundant))
        for shape in _every_shape(request, accelerator)
        for redundant in request.redundant
        if redundant <= spare_experts(request.model, shape.ep)
    ]
    kept, memory, layers, rests = [], [], [], []
    for shape in shapes:
        capacity = _capacity(request, shape)
        if capacity is None:
            continue
        rest = RestLines.of(
            request.model, accelerator, request.precision, shape.tp, request.roofline
        )
        for overlap in (False, True):
            if overlap and shape.ep == 1:
                continue  # no exchange to hide
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
    return ColocatedUnits(
        request,
        accelerator,
        np.array([s.gpus for s in kept], dtype=np.float64),
        np.array([s.tp for s in kept], dtype=np.float64),
        np.array([s.ep for s in kept], dtype=np.float64),
        np.array([s.routing.redundant for s in kept], dtype=np.float64),
        np.array([2 if s.overlap else 1 for s in kept], dtype=np.float64),
        np.array([kv_rows for kv_rows, _ in memory]),
        np.array([weights_share for _, weights_share in memory]),
        stack(rests),
        tuple(columns),
    )


def _every_shape(request: Request, accelerator: Accelerator) -> list[ColocatedShape]:
    layout = request.colocated_layout
    if layout is None:
        sizes = _sizes(accelerator.gpus_per_server)
        return [shape for gpus in sizes for shape in _shapes(request, accelerator, gpus)]
    experts = [g.ffn.experts for g in request.model.groups if isinstance(g.ffn, MoeFfn)]
    if layout.ep > min(experts, default=1):
        raise ConfigError(
            f"--layout {layout.text} has {layout.ep} expert shards, but {request.model.title} has"
            f" {min(experts, default=0)} experts; use fewer"
        )
    return [_shape(request, accelerator, layout.gpus, layout.tp, layout.ep)]


def _shape(
    request: Request, accelerator: Accelerator, gpus: int, tp: int, ep: int
) -> ColocatedShape:
    return ColocatedShape(
        accelerator,
        gpus,
        tp,
        ep,
        1.0,
        request.context.mean,
        request.exchange_precision,
        draft=request.positions - 1,
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
                continue  # several TP groups of a dense model are copies of one
            if expert_tp > 1 and narrowest // expert_tp < NARROWEST:
                continue
            if ep == 1 and tp != gpus:
                continue  # experts under TP over all GPUs need the same rows on all of them
            found.append(_shape(request, accelerator, gpus, tp, ep))
    return found


def _capacity(request: Request, shape: ColocatedShape) -> tuple[float, float] | None:
    """Returns (kv_rows, weights_share), or None if weights or the longest request do not fit."""
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
    """Returns the lines of every layer group, derived from ``colocated_step``."""
    micro_batches = 2 if shape.overlap else 1

    def at(
        rows: float, context: float, draft: int = 0, routing: Routing = shape.routing
    ) -> list[ColocatedLayer]:
        step = rows * micro_batches
        asked = replace(shape, rows=step, context=context, draft=draft, routing=routing)
        return list(colocated_step(request.model, asked, request.roofline).layers)

    lengths, shares = request.context.lengths, request.context.shares
    draft, dp = shape.draft, shape.dp
    by_length = [(at(dp, length, draft), at(2 * dp, length, draft)) for length in lengths]
    imbalanced = replace(shape.routing, imbalance=2.0)
    one, two, uneven = (at(1, 1), at(2, 1), at(1, 1, routing=imbalanced))
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
        held = held_fixed_s(request, shape.accelerator, group, handed_over=False)
        attention = replace(attention, overhead_s=attention.overhead_s - held)
        experts = exchange = None
        if moe:
            stages = (layer[index].compute for layer in (one, two, uneven))
            experts = ExpertLines.of(group.ffn, *stages)
            exchange = line_through(one[index].exchange_s, two[index].exchange_s)
        link = uneven[index].compute.link_s - one[index].compute.link_s
        found.append(ColocatedLayers(len(group.layers), attention, experts, exchange, link))
    return found


def _attention_of(stage: StageTime, moe: bool) -> StageTime:
    """Returns the stage without its experts, which are the last part."""
    return replace(stage, parts=stage.parts[:-1]) if moe else stage
