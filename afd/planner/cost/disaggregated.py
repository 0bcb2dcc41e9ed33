"""Stage times of an attention-FFN-disaggregated decode step, from a roofline. Pure; seconds.

Every stage is priced for the GPU that carries most of it. docs/planner-model.md derives each
formula and names its source; ``Efficiency`` holds what real kernels reach of the data sheet.
"""

import math

from afd.errors import ConfigError
from afd.planner.cost.shape import EVEN, AfdShape, Efficiency, Pool, Routing
from afd.planner.cost.stages import AfdStages, LayerStages, Part, StageTime
from afd.planner.facts.attention import projection_parameters_per_gpu
from afd.planner.facts.ffn import DenseFfn, Ffn, MoeFfn
from afd.planner.facts.hardware import Accelerator
from afd.planner.facts.model import LayerGroup, ModelSpec
from afd.planner.facts.precision import Precision, dtype_bytes, wire_bytes

SAMPLING_PASSES = 4
"""Times the float32 logits cross memory: written, softmax, top-p filter, draw. An estimate."""

_LOGIT_BYTES = 4
_BYTES_PER_PAIR = 3.0
"""Per hidden column of a (row, expert) pair: one byte read as FP8, two written as BF16."""


def attention_parts(
    group: LayerGroup,
    accelerator: Accelerator,
    rows: float,
    context: float,
    precision: Precision,
    tp: int,
    efficiency: Efficiency,
    queries: int = 1,
) -> tuple[Part, Part]:
    """(projections with the router, attention core) of one layer on one GPU.

    rows: decode rows of the GPU's data-parallel group; context: mean tokens attended to; queries:
    tokens per row and step (more than 1 with speculation). Weights are read once per micro-batch
    and the cache once per row; ``tp`` GPUs share heads, and the cache as far as the attention kind
    lets them. Source: Step-3 report sections 4.1, 5.2 and 6.
    """
    attention = group.attention
    weights = projection_parameters_per_gpu(attention, tp) + group.ffn.router_parameters
    projections = Part(
        "projections",
        _matmul_s(
            2.0 * weights * rows * queries, accelerator, precision.attention_weights, efficiency
        ),
        _memory_s(weights * dtype_bytes(precision.attention_weights), accelerator, efficiency),
    )
    rate = accelerator.math_flops(precision.attention_math) * efficiency.attention
    padding = _tile_padding(attention.query_rows(tp) * queries, efficiency.query_tile)
    kv_bytes = rows * attention.kv_read_bytes(context, precision.kv)
    core = Part(
        "attention",
        rows * queries * attention.core_flops(context) / tp * padding / rate,
        _memory_s(kv_bytes / attention.kv_shards(tp), accelerator, efficiency),
    )
    return projections, core


def ffn_part(
    ffn: Ffn,
    accelerator: Accelerator,
    rows: float,
    precision: Precision,
    shards: int,
    tp: int,
    efficiency: Efficiency,
    routing: Routing = EVEN,
) -> Part:
    """One FFN layer on one GPU, for a micro-batch of ``rows`` rows over all GPUs.

    shards: expert-parallel groups that divide the routed experts; tp: GPUs per group. The shared
    expert and dense layers are divided over all shards * tp GPUs. Memory traffic is the weights of
    the experts that the rows touch, plus rows in (1 byte) and out (2 bytes) per chosen expert.
    Source: Step-3 report section 5.3; distinct experts: ``MoeFfn.expected_experts``.

    Raises:
        ConfigError: more shards than experts.
    """
    if isinstance(ffn, MoeFfn) and shards > ffn.experts:
        raise ConfigError(
            f"{shards} expert-parallel groups cannot share {ffn.experts} experts; use fewer FFN "
            "GPUs, or TP inside a group"
        )
    gpus = shards * tp
    unit = dtype_bytes(precision.ffn_weights)
    if isinstance(ffn, DenseFfn):
        flops, weights = rows * ffn.flops_per_token() / gpus, ffn.touched_parameters(rows) / gpus
        pairs = rows
    else:
        pairs = rows * ffn.top_k * routing.imbalance / shards
        shared = ffn.shared_parameters / gpus
        flops = 2.0 * (pairs * ffn.expert_parameters / tp + rows * shared)
        held = math.ceil(ffn.experts / shards) / ffn.experts
        experts = ffn.expected_experts(rows, routing.load) * held
        weights = experts * ffn.expert_parameters / tp + shared * min(1.0, rows)
    traffic = weights * unit + pairs * ffn.hidden * _BYTES_PER_PAIR
    return Part(
        "ffn",
        _matmul_s(flops, accelerator, precision.ffn_weights, efficiency),
        _memory_s(traffic, accelerator, efficiency),
    )


def collective_s(
    nbytes: float, gpus: int, accelerator: Accelerator, efficiency: Efficiency
) -> float:
    """All-gather or reduce-scatter of ``nbytes`` (the whole) over ``gpus`` GPUs.

    Inside a server over its links; a group larger than a server goes at the pace of its NICs.
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
    """(attention to FFN, FFN to attention) of one micro-batch.

    Every attention GPU sends its rows to all FFN instances, each FFN GPU takes an equal share of
    its instance's rows (rail-aligned), and every FFN instance sends partial sums of all rows back
    (Step-3 report section 7.1; docs/architecture.md). The slower end of the link binds.
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
    """Attention of one layer for one micro-batch; with its FFN where ``local_ffn``."""
    pool, precision = shape.attention, shape.precision
    rows = shape.rows / pool.groups
    tokens = rows * (1 + shape.draft)
    parts: tuple[Part, ...] = attention_parts(
        group,
        pool.accelerator,
        rows,
        shape.context,
        precision,
        pool.tp,
        efficiency,
        1 + shape.draft,
    )
    collectives = 2 if local_ffn else 1  # after the output projection, after the FFN
    nbytes = tokens * group.ffn.hidden * dtype_bytes(precision.activations)
    if local_ffn:
        parts += (ffn_part(group.ffn, pool.accelerator, tokens, precision, 1, pool.tp, efficiency),)
    else:
        # partial sums of all FFN instances are read, their sum is written
        moved = (shape.ffn.instances + 1) * nbytes / pool.tp
        parts += (Part("reduce", 0.0, _memory_s(moved, pool.accelerator, efficiency)),)
    # an all-reduce is a reduce-scatter and an all-gather
    link = 2 * collectives * collective_s(nbytes, pool.tp, pool.accelerator, efficiency)
    return StageTime(parts, link, efficiency.attention_overhead_s)


def ffn_stage(ffn: Ffn, shape: AfdShape, efficiency: Efficiency) -> StageTime:
    """Experts of one layer for one micro-batch, with the collectives inside an FFN instance.

    An instance of several GPUs all-gathers the rows that its GPUs received and reduce-scatters the
    partial sums (Step-3 report section 7.1), mostly hidden behind the experts of another
    micro-batch where there is one.
    """
    pool = shape.ffn
    part = ffn_part(
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
    return StageTime((part,), exposed, efficiency.ffn_overhead_s)


def rest_seconds(
    model: ModelSpec,
    accelerator: Accelerator,
    rows: float,
    precision: Precision,
    tp: int,
    efficiency: Efficiency,
) -> float:
    """Embedding, LM head, sampling and scheduling of one step, for ``rows`` tokens of a DP group.

    The LM head is one matrix product; sampling crosses the float32 logits SAMPLING_PASSES times;
    the embedding reads one row per token. The Step-3 report leaves them out as below 5 %.
    """
    unit = dtype_bytes(precision.head)
    head = model.vocab * model.hidden / tp
    product = max(
        _matmul_s(2.0 * rows * head, accelerator, precision.head, efficiency),
        _memory_s(head * unit, accelerator, efficiency),
    )
    moved = rows * (SAMPLING_PASSES * model.vocab / tp * _LOGIT_BYTES + model.hidden * unit)
    return product + _memory_s(moved, accelerator, efficiency) + efficiency.step_overhead_s


def afd_stages(model: ModelSpec, shape: AfdShape, efficiency: Efficiency) -> AfdStages:
    """Stage times of one decode step of ``shape``.

    Layers without experts run in the attention pool unless ``shape.dense_on_ffn``.
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
        groups.append(LayerStages(group.layers, attention, ffn, to_ffn, to_attention))
    pool = shape.attention
    rest = rest_seconds(
        model,
        pool.accelerator,
        shape.depth * shape.tokens / pool.groups,
        shape.precision,
        pool.tp,
        efficiency,
    )
    return AfdStages(tuple(groups), rest)


def tokens_per_gpu_second(shape: AfdShape, step_s: float, accepted: float = 1.0) -> float:
    """TGS: output tokens per GPU and second. accepted: tokens per row and step (speculation)."""
    return shape.batch * accepted / step_s / shape.total_gpus


def usd_per_million_tokens(price_per_hour: float, tokens_per_second: float) -> float:
    """USD per 10^6 output tokens of a deployment that costs ``price_per_hour`` USD."""
    return price_per_hour / 3600 / tokens_per_second * 1e6


def _tile_padding(query_rows: int, tile: int) -> float:
    """Arithmetic of whole tiles over that of the query rows in them (1 without any)."""
    return math.ceil(query_rows / tile) * tile / query_rows if query_rows else 1.0


def _link_rate(pool: Pool, shape: AfdShape, efficiency: Efficiency) -> float:
    """Bytes/s and direction between the pools, per GPU of ``pool``."""
    if shape.one_server:
        return pool.accelerator.scale_up_bandwidth * efficiency.scale_up
    return pool.accelerator.nic_bandwidth * efficiency.network


def _matmul_s(flops: float, accelerator: Accelerator, dtype: str, efficiency: Efficiency) -> float:
    return flops / (accelerator.math_flops(dtype) * efficiency.matmul)


def _memory_s(nbytes: float, accelerator: Accelerator, efficiency: Efficiency) -> float:
    return nbytes / (accelerator.memory_bandwidth * efficiency.memory)
