"""Roofline model of the stage times of an attention-FFN-disaggregated decode step.

Every stage is priced for the GPU of its pool with the most work. docs/planner-model.md derives the
formulas and names their sources. ``Efficiency`` holds the share of data-sheet rates that real
kernels reach.
"""

from afd_planner.cost.kernels import (
    attention_fixed_s,
    kernel_attention,
    kernel_ffn,
    kernel_head,
)
from afd_planner.cost.roofline import ffn_part, memory_s
from afd_planner.cost.shape import AfdShape, Efficiency, Pool
from afd_planner.cost.stages import AfdStages, LayerStages, Part, StageTime
from afd_planner.facts.ffn import Ffn, MoeFfn
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import LayerGroup, ModelSpec
from afd_planner.facts.precision import Precision, dtype_bytes, wire_bytes


def collective_s(
    nbytes: float, gpus: int, accelerator: Accelerator, efficiency: Efficiency
) -> float:
    """Returns the seconds of an all-gather or reduce-scatter over ``gpus`` GPUs.

    ``nbytes`` is the size of the whole tensor. A group inside one server uses the server's links; a
    larger group runs at the rate of its NICs.
    """
    if gpus == 1:
        return 0.0
    rate = accelerator.scale_up_bandwidth * efficiency.scale_up
    if gpus > accelerator.gpus_per_server:
        rate = accelerator.nic_bandwidth * efficiency.network
    return nbytes * (gpus - 1) / gpus / rate + efficiency.collective_latency_s


def wire_seconds(
    shape: AfdShape, hidden: int, top_k: int, efficiency: Efficiency
) -> tuple[float, float]:
    """Returns the seconds of one micro-batch on the wire: (attention to FFN, FFN to attention).

    Every attention GPU sends its rows to all FFN instances. Each GPU of an FFN instance receives an
    equal share of the rows (rail-aligned). Every FFN instance returns partial sums of all rows
    (Step-3 report section 7.1; docs/architecture.md). The slower end of the link determines the
    time.
    """
    out, back = wire_bytes(shape.precision, hidden, top_k)
    attention, ffn = shape.attention, shape.ffn
    seconds = max(
        shape.tokens
        * ffn.instances
        / attention.total_gpus
        / _link_rate(attention, shape, efficiency),
        shape.tokens / ffn.gpus / _link_rate(ffn, shape, efficiency),
    )
    return out * seconds + efficiency.wire_latency_s, back * seconds + efficiency.wire_latency_s


def attention_stage(
    group: LayerGroup, shape: AfdShape, efficiency: Efficiency, *, local_ffn: bool
) -> StageTime:
    """Returns the attention stage of one layer for one micro-batch.

    With ``local_ffn``, the stage includes the layer's FFN.
    """
    pool, precision = shape.attention, shape.precision
    rows = shape.rows / pool.groups
    tokens = rows * (1 + shape.draft)
    parts: tuple[Part, ...] = kernel_attention(
        group,
        pool.accelerator,
        rows,
        shape.context,
        precision,
        pool.tp,
        efficiency,
        1 + shape.draft,
    )
    collectives = 2 if local_ffn else 1  # after the output projection, and after a local FFN
    nbytes = tokens * group.ffn.hidden * dtype_bytes(precision.activations)
    if local_ffn:
        parts += (ffn_part(group.ffn, pool.accelerator, tokens, precision, 1, pool.tp, efficiency),)
    else:
        # Reads the partial sums of all FFN instances and writes their sum.
        moved = (shape.ffn.instances + 1) * nbytes / pool.tp
        parts += (Part("reduce", 0.0, memory_s(moved, pool.accelerator, efficiency)),)
    # An all-reduce is a reduce-scatter and an all-gather.
    link = 2 * collectives * collective_s(nbytes, pool.tp, pool.accelerator, efficiency)
    fixed = attention_fixed_s(
        group, pool.accelerator, precision, efficiency, handed_over=not local_ffn
    )
    return StageTime(parts, link, fixed)


def ffn_stage(ffn: Ffn, shape: AfdShape, efficiency: Efficiency) -> StageTime:
    """Returns the FFN stage of one layer for one micro-batch.

    An FFN instance of several GPUs all-gathers the rows that they received and reduce-scatters the
    partial sums (Step-3 report section 7.1). At depth 2 and 3, the experts of another micro-batch
    hide most of that.
    """
    pool = shape.ffn
    part, overhead = kernel_ffn(
        ffn,
        pool.accelerator,
        shape.tokens,
        shape.precision,
        pool.groups,
        pool.tp,
        efficiency,
        shape.routing,
    )
    out, _ = wire_bytes(shape.precision, ffn.hidden, ffn.top_k)
    partial = ffn.hidden * dtype_bytes(shape.precision.activations)
    link = sum(
        collective_s(shape.tokens * nbytes, pool.gpus, pool.accelerator, efficiency)
        for nbytes in (out, partial)
    )
    exposed = link * (1 - efficiency.hidden_collectives) if shape.depth > 1 else link
    return StageTime((part,), exposed, overhead)


def rest_seconds(
    model: ModelSpec,
    accelerator: Accelerator,
    rows: float,
    precision: Precision,
    tp: int,
    efficiency: Efficiency,
) -> float:
    """Returns the seconds of embedding, LM head, sampling and scheduling of one step.

    The Step-3 report omits them because they are below 5 %.

    Args:
        rows: Tokens of one data-parallel group.
    """
    head = kernel_head(model.hidden, model.vocab / tp, accelerator, rows, precision, efficiency)
    return head.seconds + efficiency.step_overhead_s


def afd_stages(model: ModelSpec, shape: AfdShape, efficiency: Efficiency) -> AfdStages:
    """Returns the stage times of one decode step of ``shape``.

    Layers without experts run in the attention pool unless ``shape.dense_on_ffn`` is set.
    """
    groups = []
    for group in model.groups:
        remote = shape.dense_on_ffn or isinstance(group.ffn, MoeFfn)
        attention = attention_stage(group, shape, efficiency, local_ffn=not remote)
        to_ffn = to_attention = 0.0
        ffn = None
        if remote:
            ffn = ffn_stage(group.ffn, shape, efficiency)
            to_ffn, to_attention = wire_seconds(shape, model.hidden, group.ffn.top_k, efficiency)
        groups.append(
            LayerStages(group.layers, attention, ffn, to_ffn, to_attention, efficiency.turn_s)
        )
    pool = shape.attention
    rest = rest_seconds(
        model,
        pool.accelerator,
        shape.depth * shape.tokens / pool.groups,
        shape.precision,
        pool.tp,
        efficiency,
    )
    host = efficiency.host_seconds(shape.batch / pool.groups)
    return AfdStages(tuple(groups), rest, host)


def tokens_per_gpu_second(shape: AfdShape, step_s: float, accepted: float = 1.0) -> float:
    """Returns output tokens per GPU and second. ``accepted``: tokens per row and step."""
    return shape.batch * accepted / step_s / shape.total_gpus


def usd_per_million_tokens(price_per_hour: float, tokens_per_second: float) -> float:
    """Returns USD per 10^6 output tokens of a deployment that costs ``price_per_hour`` USD."""
    return price_per_hour / 3600 / tokens_per_second * 1e6


def _link_rate(pool: Pool, shape: AfdShape, efficiency: Efficiency) -> float:
    """Returns bytes/s per direction between the pools, per GPU of ``pool``."""
    if shape.one_server:
        return pool.accelerator.scale_up_bandwidth * efficiency.scale_up
    return pool.accelerator.nic_bandwidth * efficiency.network
