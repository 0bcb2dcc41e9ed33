"""All xAyF units that a request may use, as arrays, and how many rows each can serve.

A *unit* is one xAyF deployment; a plan runs one or more copies of it. ``AfdUnits`` holds the units
of one pair of accelerators, one attention TP and one wire format. Step time grows with the rows, so
``AfdUnits.rows`` finds the most rows within the TPOT limit by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from afd_planner.cost.interpolate import Array
from afd_planner.facts.ffn import Ffn, MoeFfn
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.precision import wire_bytes
from afd_planner.sizing.factors import attention_factors, expert_factor, head_factor
from afd_planner.sizing.imbalance import EVEN_SPREAD
from afd_planner.sizing.layout import AfdLayout
from afd_planner.sizing.lines import ExpertLines, experts_used, take
from afd_planner.sizing.memory import Ranks, sequences_beside_weights, sequences_that_fit
from afd_planner.sizing.pools import AttentionPools, FfnPools, attention_pools, ffn_pools
from afd_planner.sizing.request import MAX_UNIT_GPUS, Request

Index = NDArray[np.intp]

SMALL_SIDE = 4
"""Largest number of instances in the smaller pool; see ``_pairs``."""

MOST_ROWS = 16384
"""Upper bound of rows per GPU and micro-batch in the bisection; more rows gain nothing."""


@dataclass(frozen=True)
class Relief:
    """Costs to leave out, so that the verdict can measure what they are worth.

    Attributes:
        rereads: Expert weights are read once per step instead of once per micro-batch.
        network: The wire takes no time.
        kv: The cache is unlimited.
        imbalance: Experts are evenly loaded.
        overheads: There are no fixed times.
    """

    rereads: bool = False
    network: bool = False
    kv: bool = False
    imbalance: bool = False
    overheads: bool = False


NO_RELIEF = Relief()


@dataclass(frozen=True)
class AfdUnits:
    """All units that pair ``attention`` and ``ffn`` with one wire format, as arrays [n].

    Attributes:
        one_server: Whether both pools share one server.
        x: Attention instances, float64.
        depth: Micro-batches in flight, float64.
        which: Index into the arrays of ``ffn``.
        capacity: Sequences that one attention GPU holds.
    """

    request: Request
    attention: AttentionPools
    ffn: FfnPools
    wire: str
    one_server: bool
    x: Array
    depth: Array
    which: Index
    capacity: Array

    @property
    def attention_gpus(self) -> Array:
        return self.x * self.attention.gpus

    @property
    def ffn_gpus(self) -> Array:
        return self.y * self.ffn.gpus

    @property
    def y(self) -> Array:
        return self.ffn.instances[self.which]

    @property
    def redundant(self) -> Array:
        """Copies of experts per expert group and layer."""
        return self.ffn.redundant[self.which]

    @property
    def gpus(self) -> Array:
        return self.attention_gpus + self.ffn_gpus

    @property
    def price(self) -> Array:
        """USD per hour of one unit."""
        return (
            self.attention_gpus * self.attention.accelerator.price_per_hour
            + self.ffn_gpus * self.ffn.accelerator.price_per_hour
        )

    @property
    def groups(self) -> Array:
        """Number of data-parallel groups of the attention pool."""
        return self.attention_gpus / self.attention.tp

    def picked(self, keep: NDArray[np.bool_]) -> AfdUnits:
        """Returns only the units where ``keep`` is true."""
        names = ("x", "depth", "which", "capacity")
        return replace(self, **{name: vars(self)[name][keep] for name in names})

    def step(self, rows: Array, relief: Relief = NO_RELIEF) -> Array:
        """Returns the seconds [n] of one decode step: ``cost.stages.step_seconds`` for all units.

        ``rows`` [n] are sequences per data-parallel group and micro-batch.
        """
        seconds = self._rest(rows * self.depth * self.request.positions)
        turn_s = 0.0 if relief.overheads else self.request.efficiency.turn_s
        fill = np.zeros_like(seconds)
        for index, group in enumerate(self.request.model.groups):
            attention = self._attention(index, rows, relief)
            table = self.ffn.groups[index]
            if table is None:
                seconds = seconds + len(group.layers) * self.depth * attention
                continue
            tokens = rows * self.groups * self.request.positions
            ffn = self._ffn(table, group.ffn, tokens, relief)
            out, back = self._wire(tokens, group.ffn.top_k, relief)
            busiest = np.maximum.reduce([attention, ffn, out, back]) + turn_s
            trip = attention + ffn + out + back
            period = np.maximum(self.depth * busiest, trip)
            seconds = seconds + len(group.layers) * period
            fill = np.maximum(fill, trip + (self.depth - 1) * busiest - period)
        host = self.request.efficiency.host_seconds(rows * self.depth)
        return np.maximum(seconds + fill, host)

    def _rest(self, tokens: Array) -> Array:
        measured = self.request.measured
        if measured is not None and measured.rest is not None:
            return measured.rest.at(tokens)
        pools = self.attention
        factor = head_factor(self.request, pools.accelerator, np.float64(pools.tp), tokens)
        return pools.rest.at(tokens, factor)

    def _attention(self, index: int, rows: Array, relief: Relief) -> Array:
        """Returns attention of one layer of group ``index``, with its FFN unless that is remote."""
        request = self.request
        if request.measured is not None and request.measured.attention is not None:
            contexts = np.full_like(rows, request.context.mean)
            return request.measured.attention.at(rows * request.positions, contexts)
        lines, reduce = self.attention.groups[index], self.attention.reduces[index]
        pools, group = self.attention, request.model.groups[index]
        tp = np.float64(pools.tp)
        factors = attention_factors(request, pools.accelerator, group, tp, rows)
        seconds = lines.at(rows, factors)
        if relief.overheads:
            seconds = seconds - lines.overhead_s
        return seconds if reduce is None else seconds + rows * reduce.at(self.y)

    def _ffn(self, table: ExpertLines, ffn: Ffn, tokens: Array, relief: Relief) -> Array:
        """Returns the seconds of one FFN layer; ``tokens`` of the whole pool."""
        request, groups = self.request, self.ffn_gpus / self.ffn.tp[self.which]
        experts = ffn.experts if isinstance(ffn, MoeFfn) else 1
        measured = request.measured
        if measured is not None and measured.ffn is not None:
            held = experts / groups if measured.ffn_experts else measured.experts_line(None)
            return measured.ffn.at(tokens, np.broadcast_to(held, tokens.shape))
        lines: ExpertLines = take(table, self.which)
        spread = EVEN_SPREAD if relief.imbalance else request.spread
        slowest = spread.slowest(tokens, groups, experts, ffn.top_k, self.redundant)
        reads = 1.0 / self.depth if relief.rereads else 1.0
        seconds = lines.at(tokens, experts_used(ffn, tokens), slowest, reads)
        fixed = 0.0 if relief.overheads else lines.overhead_s
        # The lines are for depth 1, where nothing hides the collectives.
        exposed = np.where(self.depth > 1, 1 - request.efficiency.hidden_collectives, 1.0)
        tp = self.ffn.tp[self.which]
        factor = expert_factor(request, self.ffn.accelerator, ffn, tp, tokens, groups)
        return (seconds + fixed) * factor + lines.link.at(tokens) * exposed

    def _wire(self, tokens: Array, top_k: int, relief: Relief) -> tuple[Array, Array]:
        """Returns ``disaggregated.wire_seconds`` for all units; ``tokens`` per micro-batch."""
        if relief.network:
            return np.zeros_like(tokens), np.zeros_like(tokens)
        request, x = self.request, self.x
        sizes = wire_bytes(replace(request.precision, wire=self.wire), request.model.hidden, top_k)
        per_attention = tokens * self.y / self.attention_gpus
        per_ffn = tokens / self.ffn.gpus
        measured = request.measured
        if measured is not None and measured.wire is not None:
            message = np.maximum(per_attention / self.y, per_ffn / x)
            out, back = (measured.wire.at(message * size) for size in sizes)
            return out, back
        slowest = np.maximum(
            per_attention / self._link_rate(self.attention.accelerator),
            per_ffn / self._link_rate(self.ffn.accelerator),
        )
        latency = 0.0 if relief.overheads else request.efficiency.wire_latency_s
        out, back = (size * slowest + latency for size in sizes)
        return out, back

    def _link_rate(self, accelerator: Accelerator) -> float:
        """Returns bytes/s per direction between the pools, per GPU."""
        efficiency = self.request.efficiency
        if self.one_server:
            return accelerator.scale_up_bandwidth * efficiency.scale_up
        return accelerator.nic_bandwidth * efficiency.network

    def rows(self, tpot_s: float, relief: Relief = NO_RELIEF) -> Array:
        """Returns the most rows [n] per data-parallel group and micro-batch within ``tpot_s``.

        With a stated batch, these are its rows, or 0 if they do not fit.
        """
        limit = tpot_s * self.request.accepted
        low = np.zeros_like(self.x)
        capacity = np.full_like(self.x, np.inf) if relief.kv else self.capacity
        high = np.floor(np.minimum(capacity / self.depth, MOST_ROWS))
        if self.request.batch is not None and self.request.afd_layout is not None:
            asked = self.request.batch / (self.depth * self.groups)
            return np.asarray(np.where(asked * self.depth <= capacity, asked, 0.0))
        while np.any(low < high):
            middle = np.ceil((low + high) / 2)
            good = self.step(np.maximum(middle, 1), relief) <= limit
            low = np.where(good, np.minimum(middle, high), low)
            high = np.where(good, high, np.maximum(middle - 1, low))
        return low

    def tokens_per_s(self, rows: Array, relief: Relief = NO_RELIEF) -> Array:
        """Returns the output tokens per second [n] of one unit at ``rows``."""
        step = self.step(np.maximum(rows, 1), relief)
        return self.depth * rows * self.groups * self.request.accepted / step


FfnTables = dict[tuple[str, int, int, str], FfnPools | None]
"""FFN pools by accelerator, GPUs per instance, most instances and wire format. They are
context-independent."""


def afd_units(request: Request, tables: FfnTables) -> list[AfdUnits]:
    """Returns all units of up to MAX_UNIT_GPUS GPUs. ``tables`` caches FFN pools between calls."""
    found = []
    for attention in request.attention:
        for ffn in request.ffn:
            if request.afd_layout is not None:
                found += _stated(request, request.afd_layout, attention, ffn, tables)
                continue
            found += _between_servers(request, attention, ffn, tables)
            if attention.name == ffn.name:
                found += _in_one_server(request, attention, tables)
    return found


def _ffn(
    request: Request, accelerator: Accelerator, gpus: int, most: int, wire: str, tables: FfnTables
) -> FfnPools | None:
    key = (accelerator.name, gpus, most, wire)
    if key not in tables:
        tables[key] = ffn_pools(request, accelerator, gpus, most, wire)
    return tables[key]


def _between_servers(
    request: Request, first: Accelerator, second: Accelerator, tables: FfnTables
) -> list[AfdUnits]:
    most_x = MAX_UNIT_GPUS // first.gpus_per_server
    most_y = MAX_UNIT_GPUS // second.gpus_per_server
    # `afd serve` has no TP inside an attention instance, so it is not searched.
    attention = attention_pools(request, first, first.gpus_per_server, 1)
    found = []
    for wire in request.usable_wires:
        ffn = _ffn(request, second, second.gpus_per_server, most_y, wire, tables)
        if ffn is not None and attention is not None:
            found.append(_pairs(request, attention, ffn, wire, most_x, MAX_UNIT_GPUS))
    return found


def _stated(
    request: Request,
    layout: AfdLayout,
    first: Accelerator,
    second: Accelerator,
    tables: FfnTables,
) -> list[AfdUnits]:
    """Returns the stated deployment, in every depth and wire format to search."""
    gpus = [layout.gpus or accelerator.gpus_per_server for accelerator in (first, second)]
    attention = attention_pools(request, first, gpus[0], 1)
    one_server = first.name == second.name and layout.x * gpus[0] + layout.y * gpus[1] <= (
        first.gpus_per_server
    )
    found = []
    for wire in request.usable_wires:
        ffn = _ffn(request, second, gpus[1], layout.y, wire, tables)
        if ffn is None or attention is None:
            continue
        which = np.flatnonzero((ffn.instances == layout.y) & (ffn.tp == layout.tp))
        depths = np.array(sorted(request.depths), dtype=np.float64)
        depth, index = np.repeat(depths, which.size), np.tile(which, depths.size)
        x = np.full_like(depth, layout.x)
        if x.size:
            found.append(_units(request, attention, ffn, wire, one_server, x, depth, index))
    return found


def _in_one_server(request: Request, accelerator: Accelerator, tables: FfnTables) -> list[AfdUnits]:
    gpus = accelerator.gpus_per_server
    attention = attention_pools(request, accelerator, 1, 1)
    found = []
    for wire in request.usable_wires:
        ffn = _ffn(request, accelerator, 1, gpus - 1, wire, tables)
        if ffn is not None and attention is not None:
            found.append(_pairs(request, attention, ffn, wire, gpus - 1, gpus))
    return found


def _pairs(
    request: Request,
    attention: AttentionPools,
    ffn: FfnPools,
    wire: str,
    most_x: int,
    most_gpus: int,
) -> AfdUnits:
    grid = np.meshgrid(
        np.arange(1, most_x + 1, dtype=np.float64),
        np.array(sorted(request.depths), dtype=np.float64),
        np.arange(len(ffn.tp)),
        indexing="ij",
    )
    x, depth, which = (axis.ravel() for axis in grid)
    gpus = x * attention.gpus + ffn.instances[which] * ffn.gpus
    y = ffn.instances[which]
    # A unit with many instances in both pools is equivalent to copies of a smaller one.
    small = (np.minimum(x, y) <= SMALL_SIDE) | (y < y.min() + SMALL_SIDE)
    keep = (gpus <= most_gpus) & small
    one_server = most_gpus <= attention.accelerator.gpus_per_server
    return _units(request, attention, ffn, wire, one_server, x[keep], depth[keep], which[keep])


def _units(
    request: Request,
    attention: AttentionPools,
    ffn: FfnPools,
    wire: str,
    one_server: bool,
    x: Array,
    depth: Array,
    which: Index,
) -> AfdUnits:
    ranks = Ranks(
        attention=x * attention.gpus,
        ffn=ffn.instances[which] * ffn.gpus,
        depth=depth,
        ffn_weights=ffn.weights[which],
        copied=not one_server,
    )
    most = MOST_ROWS * max(request.depths)
    if request.afd_layout is not None:
        capacity = np.full_like(x, min(sequences_beside_weights(request, attention), most))
    else:
        capacity = sequences_that_fit(request, attention, ffn, wire, ranks, most)
    return AfdUnits(request, attention, ffn, wire, one_server, x, depth, which, capacity)
