"""Rooflines of the parts of a decode step: data-sheet rates times the efficiencies of kernels."""

import math

from afd.errors import ConfigError
from afd_planner.cost.shape import EVEN_ROUTING, Efficiency, Routing
from afd_planner.cost.stages import Part
from afd_planner.facts.attention import projection_parameters_per_gpu
from afd_planner.facts.ffn import DenseFfn, Ffn, MoeFfn
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import LayerGroup
from afd_planner.facts.precision import Precision, dtype_bytes

SAMPLING_PASSES = 4
"""Passes over the float32 logits: write, softmax, top-p filter, draw. An estimate."""

LOGIT_BYTES = 4
_BYTES_PER_PAIR = 3.0
"""Per (row, expert) pair and hidden column: one byte read (FP8), two written (BF16)."""


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
    """Returns (projections with the router, attention core) of one layer on one GPU.

    Weights are read once per micro-batch and the cache once per row. The ``tp`` GPUs divide the
    heads, and the cache if the attention kind allows it. Source: Step-3 report sections 4.1, 5.2
    and 6.

    Args:
        rows: Decode rows of the GPU's data-parallel group.
        context: Mean number of tokens attended to.
        queries: Tokens per row and step; more than 1 with speculation.
    """
    attention = group.attention
    weights = projection_parameters_per_gpu(attention, tp) + group.ffn.router_parameters
    projections = Part(
        "projections",
        matmul_s(
            2.0 * weights * rows * queries, accelerator, precision.attention_weights, efficiency
        ),
        memory_s(weights * dtype_bytes(precision.attention_weights), accelerator, efficiency),
    )
    rate = accelerator.math_flops(precision.attention_math) * efficiency.attention
    padding = _tile_padding(attention.query_rows(tp) * queries, efficiency.query_tile)
    kv_bytes = rows * attention.kv_read_bytes(context, precision.kv)
    core = Part(
        "attention",
        rows * queries * attention.core_flops(context) / tp * padding / rate,
        memory_s(kv_bytes / attention.kv_shards(tp), accelerator, efficiency),
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
    routing: Routing = EVEN_ROUTING,
) -> Part:
    """Returns one FFN layer on one GPU, for a micro-batch of ``rows`` rows over all GPUs.

    Shared experts and dense layers are divided over all shards * tp GPUs. Memory traffic is the
    weights of the distinct experts (``MoeFfn.expected_experts``) and, per (row, expert) pair and
    column, 1 byte of input and 2 bytes of output. Source: Step-3 report section 5.3.

    Args:
        shards: Expert-parallel groups that divide the routed experts.
        tp: GPUs per group.

    Raises:
        ConfigError: There are more shards than experts.
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
        held = (math.ceil(ffn.experts / shards) + routing.redundant) / ffn.experts
        experts = ffn.expected_experts(rows) * held
        weights = experts * ffn.expert_parameters / tp + shared * min(1.0, rows)
    return _experts(flops, weights * unit, pairs * ffn.hidden, accelerator, precision, efficiency)


def routed_part(
    ffn: MoeFfn,
    accelerator: Accelerator,
    pairs: float,
    used: float,
    precision: Precision,
    tp: int,
    efficiency: Efficiency,
) -> Part:
    """Returns the routed experts of one layer on one GPU for known (row, expert) pairs.

    Args:
        pairs: Pairs whose expert is on this GPU. used: Distinct experts of these pairs.
        tp: GPUs that divide each expert.
    """
    each = ffn.expert_parameters / tp
    weights = used * each * dtype_bytes(precision.ffn_weights)
    columns = pairs * ffn.hidden
    return _experts(2.0 * pairs * each, weights, columns, accelerator, precision, efficiency)


def _experts(
    flops: float,
    weight_bytes: float,
    columns: float,
    accelerator: Accelerator,
    precision: Precision,
    efficiency: Efficiency,
) -> Part:
    return Part(
        "ffn",
        matmul_s(flops, accelerator, precision.ffn_weights, efficiency),
        memory_s(weight_bytes + columns * _BYTES_PER_PAIR, accelerator, efficiency),
    )


def head_part(
    hidden: int,
    vocab: float,
    accelerator: Accelerator,
    rows: float,
    precision: Precision,
    efficiency: Efficiency,
) -> Part:
    """Returns LM head, sampling and embedding of ``rows`` tokens; ``vocab`` columns on this GPU.

    The LM head is one matrix product, sampling passes SAMPLING_PASSES times over the float32
    logits, and the embedding reads one row per token.
    """
    unit = dtype_bytes(precision.head)
    product = max(
        matmul_s(2.0 * rows * vocab * hidden, accelerator, precision.head, efficiency),
        memory_s(vocab * hidden * unit, accelerator, efficiency),
    )
    moved = rows * (SAMPLING_PASSES * vocab * LOGIT_BYTES + hidden * unit)
    return Part("head", 0.0, product + memory_s(moved, accelerator, efficiency))


def _tile_padding(query_rows: int, tile: int) -> float:
    """Returns computed rows over query rows, as kernels compute whole tiles; 1 without rows."""
    return math.ceil(query_rows / tile) * tile / query_rows if query_rows else 1.0


def matmul_s(flops: float, accelerator: Accelerator, dtype: str, efficiency: Efficiency) -> float:
    """Returns the seconds of matrix products with inputs of this format."""
    return flops / (accelerator.math_flops(dtype) * efficiency.matmul)


def memory_s(nbytes: float, accelerator: Accelerator, efficiency: Efficiency) -> float:
    """Returns the seconds to move ``nbytes`` between memory and chip."""
    return nbytes / (accelerator.memory_bandwidth * efficiency.memory)
