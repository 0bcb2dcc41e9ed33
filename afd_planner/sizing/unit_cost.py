"""Prices one xAyF or colocated unit by the cost model, and names its bottleneck."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from afd_planner.cost.colocated import colocated_step
from afd_planner.cost.disaggregated import afd_stages
from afd_planner.cost.shape import AfdShape, ColocatedShape, Pool, Routing
from afd_planner.cost.stages import AfdStages, Part, StageTime, layer_period, layers_seconds
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.model import LayerGroup
from afd_planner.facts.precision import wire_bytes
from afd_planner.sizing.plan import Constraint
from afd_planner.sizing.pools import shape_of
from afd_planner.sizing.request import Request

STAGES = ("attention", "ffn", "wire", "rest")
"""Stages of a decode step that a file of measured times may contain."""


def routing_for(request: Request, rows: float, groups: int, redundant: int = 0) -> Routing:
    """Returns the routing of a micro-batch of ``rows`` rows over ``groups`` expert groups.

    ``redundant``: copies of experts per group.
    """
    moe = [g.ffn for g in request.model.groups if isinstance(g.ffn, MoeFfn)]
    if not moe:
        return Routing()
    slowest = request.spread.slowest(
        np.array([rows]),
        np.array([float(groups)]),
        moe[0].experts,
        moe[0].top_k,
        np.array([redundant]),
    )
    return Routing(imbalance=float(slowest[0]), redundant=redundant)


def afd_point(
    request: Request,
    attention: Pool,
    ffn: Pool,
    depth: int,
    rows: float,
    wire: str,
    redundant: int = 0,
) -> tuple[AfdShape, AfdStages, tuple[str, ...]]:
    """Returns (shape, stages, names of measured stages) of one unit.

    ``rows`` are per micro-batch, ``redundant`` copies of experts per group.
    """
    routing = routing_for(request, rows * request.positions, ffn.groups, redundant)
    shape = shape_of(request, attention, ffn, depth, rows, wire=wire, routing=routing)
    stages = afd_stages(request.model, shape, request.efficiency)
    return shape, *_with_measured(request, shape, stages)


def _with_measured(
    request: Request, shape: AfdShape, stages: AfdStages
) -> tuple[AfdStages, tuple[str, ...]]:
    """Returns the stages with measured times where available, and the names of those stages."""
    measured = request.measured
    if measured is None:
        return stages, ()
    own = shape.tokens / shape.attention.groups
    tables = (measured.attention, measured.ffn, measured.wire, measured.rest)
    names = tuple(n for n, table in zip(STAGES, tables, strict=True) if table is not None)
    groups = []
    for group, kind in zip(stages.groups, request.model.groups, strict=True):
        if "attention" in names:
            seconds = measured.t_attention(own, shape.context).seconds
            group = replace(group, attention=_flat("attention", seconds))
        if group.ffn is not None and "ffn" in names:
            held = kind.ffn.experts / shape.ffn.groups if isinstance(kind.ffn, MoeFfn) else None
            seconds = measured.t_ffn(shape.tokens, held).seconds
            group = replace(group, ffn=_flat("ffn", seconds))
        if group.ffn is not None and "wire" in names:
            out, back = (measured.t_wire(size).seconds for size in _messages(request, shape, kind))
            group = replace(group, to_ffn=out, to_attention=back)
        groups.append(group)
    rest = measured.t_rest(own * shape.depth).seconds if "rest" in names else stages.rest_s
    return replace(stages, groups=tuple(groups), rest_s=rest), names


def _messages(request: Request, shape: AfdShape, group: LayerGroup) -> tuple[float, float]:
    """Returns the bytes of the largest message between two GPUs: (to the FFN, back)."""
    rows = max(
        shape.tokens / shape.attention.total_gpus,
        shape.tokens / shape.ffn.gpus / shape.attention.instances,
    )
    out, back = wire_bytes(shape.precision, request.model.hidden, group.ffn.top_k)
    return rows * out, rows * back


def _flat(name: str, seconds: float) -> StageTime:
    return StageTime((Part(name, seconds, 0.0),), measured=True)


def binding_afd(stages: AfdStages, depth: int) -> Constraint:
    """Returns the bottleneck of the layer group that takes most of the step."""
    if stages.host_s > layers_seconds(stages, depth) + stages.rest_s:
        return Constraint.HOST
    layer = max(stages.groups, key=lambda g: len(g.layers) * layer_period(g, depth))
    if layer.ffn is None:
        return _attention_bound(layer.attention)
    busy = {
        "attention": layer.attention.seconds,
        "ffn": layer.ffn.seconds,
        "network": max(layer.to_ffn, layer.to_attention),
    }
    busiest = max(busy, key=lambda name: busy[name])
    if depth * layer.busiest_s < layer_period(layer, depth) * (1 - 1e-9):
        return Constraint.SLO_SLOT
    if busiest == "network":
        return Constraint.NETWORK
    return _attention_bound(layer.attention) if busiest == "attention" else _ffn_bound(layer.ffn)


def _attention_bound(stage: StageTime) -> Constraint:
    if stage.measured:
        return Constraint.ATTENTION_STAGE
    return {
        "compute": Constraint.ATTENTION_COMPUTE,
        "memory": Constraint.ATTENTION_BANDWIDTH,
        "link": Constraint.SERVER_LINKS,
        "overhead": Constraint.FIXED_TIMES,
    }[stage.bound]


def _ffn_bound(stage: StageTime) -> Constraint:
    if stage.measured:
        return Constraint.FFN_STAGE
    return {
        "compute": Constraint.FFN_COMPUTE,
        "memory": Constraint.FFN_WEIGHT_READS,
        "link": Constraint.SERVER_LINKS,
        "overhead": Constraint.FIXED_TIMES,
    }[stage.bound]


def binding_colocated(request: Request, shape: ColocatedShape) -> Constraint:
    """Returns the longest of attention, FFN and exchange, of the slowest layer group."""
    micro_batches = 2 if shape.overlap else 1
    tokens = shape.rows * request.positions
    routing = routing_for(request, tokens / micro_batches, shape.ep, shape.routing.redundant)
    step = colocated_step(request.model, replace(shape, routing=routing), request.efficiency)
    if step.host_s > step.layers_s + step.rest_s:
        return Constraint.HOST
    layer, group = max(
        zip(step.layers, request.model.groups, strict=True),
        key=lambda pair: len(pair[0].layers) * pair[0].compute.seconds,
    )
    *parts, last = layer.compute.parts
    attention, ffn = StageTime(tuple(parts)), StageTime((last,))
    measured, tokens = request.measured, tokens / micro_batches
    if measured is not None and measured.attention is not None:
        seconds = measured.t_attention(tokens / shape.dp, shape.context).seconds
        attention = _flat("attention", seconds)
    if measured is not None and measured.ffn is not None and isinstance(group.ffn, MoeFfn):
        ffn = _flat("ffn", measured.t_ffn(tokens, group.ffn.experts / shape.ep).seconds)
    times = {
        Constraint.NETWORK: layer.exchange_s,
        Constraint.SERVER_LINKS: layer.compute.link_s,
        Constraint.FIXED_TIMES: layer.compute.overhead_s,
        _attention_bound(attention): attention.seconds,
        _ffn_bound(ffn): ffn.seconds,
    }
    return max(times, key=lambda name: times[name])
