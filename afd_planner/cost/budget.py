"""Closed formulas: the time slot of a stage, batch and sparsity limits, and memory use."""

import math
from dataclasses import dataclass

from afd_planner.cost.shape import AfdShape, ColocatedShape, Efficiency
from afd_planner.facts.attention import projection_parameters_per_gpu
from afd_planner.facts.ffn import DenseFfn, Ffn, MoeFfn
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.precision import Precision, dtype_bytes


def slot_seconds(tpot: float, accepted: float, rest_s: float, layers: int, depth: int) -> float:
    """Returns the time that each stage may take for one layer of one micro-batch, seconds.

    slot = (TPOT * accepted - t_rest) / (layers * depth). A TPOT of 50 ms, 61 layers, depth 3, no
    speculation and no rest give the 272 us of Step-3 report section 6. The slot is negative if the
    rest alone exceeds the TPOT.

    Args:
        tpot: Seconds per output token.
        accepted: Tokens per row and step.
        rest_s: Seconds per step outside the layers.
    """
    return (tpot * accepted - rest_s) / (layers * depth)


def rows_for_compute_bound(accelerator: Accelerator, dtype: str, sparsity: float) -> float:
    """Returns B_MoE, the rows per micro-batch from which an FFN is compute-bound.

    B_MoE = FLOPs * bytes per weight / (2 * S * bandwidth). Step-3 report section 5.3 states it for
    1-byte weights.
    """
    return accelerator.roofline(dtype) * dtype_bytes(dtype) / (2 * sparsity)


def sparsity_floor(
    flops: float,
    memory_bandwidth: float,
    network: float,
    hidden: int,
    layers: int,
    comm_budget_s: float,
    bytes_per_value: float = 3.0,
) -> float:
    """Returns the smallest sparsity S at which the network can keep the FFN compute-bound.

    S >= bytes_per_value * H * FLOPs * L / (2 * Net * bandwidth * comm_budget), Step-3 report
    section 5.4. The report's 11.1 ms are 2/3 of a comm_budget of 16.6 ms at 3 bytes per value
    (8-bit dispatch, 16-bit combine).

    Args:
        flops: FLOP/s of one GPU.
        memory_bandwidth: Bytes/s of one GPU.
        network: Bytes/s of one FFN instance.
        comm_budget_s: Seconds per step for the communication of all layers.
    """
    rows_needed_times_s = flops / (2 * memory_bandwidth)
    rows_possible = network * comm_budget_s / (layers * bytes_per_value * hidden)
    return rows_needed_times_s / rows_possible


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the fullest GPU of a pool: bytes of weights, and usable bytes."""

    weights: float
    usable: float

    @property
    def free(self) -> float:
        """Bytes left for KV cache and buffers; negative if the weights do not fit."""
        return self.usable - self.weights

    @property
    def fits(self) -> bool:
        return self.free > 0


def attention_memory(model: ModelSpec, shape: AfdShape, efficiency: Efficiency) -> MemoryUse:
    """Attention pool: projections, routers, embedding, LM head, and dense FFNs unless remote."""
    local = () if shape.dense_on_ffn else (DenseFfn,)
    weights = _attention_weights(model, shape.precision, shape.attention.tp)
    weights += _ffn_weights(model, shape.precision, local, 1, shape.attention.tp)
    return _use(weights, shape.attention.accelerator, efficiency)


def ffn_memory(model: ModelSpec, shape: AfdShape, efficiency: Efficiency) -> MemoryUse:
    """FFN pool: the GPU with the most experts, with its share of shared experts and dense FFNs."""
    remote = (MoeFfn, DenseFfn) if shape.dense_on_ffn else (MoeFfn,)
    pool = shape.ffn
    redundant = shape.routing.redundant
    weights = _ffn_weights(model, shape.precision, remote, pool.groups, pool.tp, redundant)
    return _use(weights, pool.accelerator, efficiency)


def colocated_memory(model: ModelSpec, shape: ColocatedShape, efficiency: Efficiency) -> MemoryUse:
    """Colocated serving: attention and dense FFNs per TP group, experts over all GPUs."""
    weights = _attention_weights(model, shape.precision, shape.tp)
    weights += _ffn_weights(model, shape.precision, (DenseFfn,), 1, shape.tp)
    weights += _ffn_weights(
        model,
        shape.precision,
        (MoeFfn,),
        shape.ep,
        shape.gpus // shape.ep,
        shape.routing.redundant,
    )
    return _use(weights, shape.accelerator, efficiency)


def kv_capacity_rows(
    model: ModelSpec, use: MemoryUse, context: float, precision: Precision, tp: int
) -> float:
    """Returns how many sequences of ``context`` tokens fit into the cache of one TP group.

    Each GPU of the group stores one shard. If the attention kind has fewer shards than ``tp``, GPUs
    hold copies.
    """
    per_gpu = sum(
        len(g.layers)
        * g.attention.kv_stored_bytes(context, precision.kv)
        / g.attention.kv_shards(tp)
        for g in model.groups
    )
    return max(0.0, use.free) / per_gpu


def _attention_weights(model: ModelSpec, precision: Precision, tp: int) -> float:
    unit = dtype_bytes(precision.attention_weights)
    layers = sum(
        len(g.layers) * (projection_parameters_per_gpu(g.attention, tp) + g.ffn.router_parameters)
        for g in model.groups
    )
    return layers * unit + model.embedding_parameters / tp * dtype_bytes(precision.head)


def _ffn_weights(
    model: ModelSpec,
    precision: Precision,
    kinds: tuple[type[Ffn], ...],
    shards: int,
    tp: int,
    redundant: int = 0,
) -> float:
    unit = dtype_bytes(precision.ffn_weights)
    total = 0.0
    for group in model.groups:
        if not isinstance(group.ffn, kinds):
            continue
        if isinstance(group.ffn, MoeFfn):
            held = math.ceil(group.ffn.experts / shards) + redundant
            experts = held * group.ffn.expert_parameters
            per_gpu = experts / tp + group.ffn.shared_parameters / (shards * tp)
        else:
            per_gpu = group.ffn.parameters / (shards * tp)
        total += len(group.layers) * per_gpu
    return total * unit


def _use(weights: float, accelerator: Accelerator, efficiency: Efficiency) -> MemoryUse:
    return MemoryUse(weights, accelerator.memory_bytes * efficiency.memory_use)
