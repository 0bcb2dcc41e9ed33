"""Closed formulas: the time slot of a stage, batch and sparsity limits, and what fits in memory."""

import math
from dataclasses import dataclass

from afd.planner.cost.shape import AfdShape, ColocatedShape, Efficiency
from afd.planner.facts.attention import projection_parameters_per_gpu
from afd.planner.facts.ffn import DenseFfn, Ffn, MoeFfn
from afd.planner.facts.hardware import Accelerator
from afd.planner.facts.model import ModelSpec
from afd.planner.facts.precision import Precision, dtype_bytes


def slot_seconds(tpot: float, accepted: float, rest_s: float, layers: int, depth: int) -> float:
    """Time that any stage of one layer may take for one micro-batch, seconds.

    slot = (TPOT * accepted - t_rest) / (layers * depth), design section 6; with TPOT 50 ms, no
    speculation, no rest, 61 layers and depth 3 it is Step-3 report section 6's 272 us. accepted:
    tokens per row and step. Negative when the rest alone exceeds the TPOT.
    """
    return (tpot * accepted - rest_s) / (layers * depth)


def rows_for_compute_bound(accelerator: Accelerator, dtype: str, sparsity: float) -> float:
    """B_MoE: rows per micro-batch from which an FFN is compute-bound.

    B_MoE = FLOPs / (2 * S * bandwidth) for 1-byte weights (Step-3 report section 5.3); weights of
    another width scale it, because each byte then holds more or fewer weights.
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
    """Smallest S that still reaches compute-bound FFNs while the network keeps up.

    S >= bytes_per_value * H * FLOPs * L / (2 * Net * bandwidth * comm_budget): Step-3 report
    section 5.4, whose 11.1 ms are 2/3 of a comm_budget of 16.6 ms with 3 bytes per value (8-bit
    dispatch, 16-bit combine). flops, memory_bandwidth: of one GPU. network: bytes/s of one FFN
    instance. comm_budget_s: seconds per step for all layers' communication.
    """
    rows_needed_times_s = flops / (2 * memory_bandwidth)
    rows_possible = network * comm_budget_s / (layers * bytes_per_value * hidden)
    return rows_needed_times_s / rows_possible


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the fullest GPU of a pool: weights, what the cache may take, usable memory."""

    weights: float
    usable: float

    @property
    def free(self) -> float:
        """Bytes left for KV cache and buffers; negative where the weights do not fit."""
        return self.usable - self.weights

    @property
    def fits(self) -> bool:
        return self.free > 0


def attention_memory(model: ModelSpec, shape: AfdShape, efficiency: Efficiency) -> MemoryUse:
    """Attention pool: projections, routers, embedding, LM head, and dense FFNs kept here."""
    local = () if shape.dense_on_ffn else (DenseFfn,)
    weights = _attention_weights(model, shape.precision, shape.attention.tp)
    weights += _ffn_weights(model, shape.precision, local, 1, shape.attention.tp)
    return _use(weights, shape.attention.accelerator, efficiency)


def ffn_memory(model: ModelSpec, shape: AfdShape, efficiency: Efficiency) -> MemoryUse:
    """FFN pool: the GPU with most experts, and its part of shared experts and dense FFNs."""
    remote = (MoeFfn, DenseFfn) if shape.dense_on_ffn else (MoeFfn,)
    pool = shape.ffn
    weights = _ffn_weights(model, shape.precision, remote, pool.groups, pool.tp)
    return _use(weights, pool.accelerator, efficiency)


def colocated_memory(model: ModelSpec, shape: ColocatedShape, efficiency: Efficiency) -> MemoryUse:
    """Colocated serving: attention weights per TP group, experts over all GPUs, dense per group."""
    weights = _attention_weights(model, shape.precision, shape.tp)
    weights += _ffn_weights(model, shape.precision, (DenseFfn,), 1, shape.tp)
    weights += _ffn_weights(model, shape.precision, (MoeFfn,), shape.ep, shape.gpus // shape.ep)
    return _use(weights, shape.accelerator, efficiency)


def kv_capacity_rows(
    model: ModelSpec, use: MemoryUse, context: float, precision: Precision, tp: int
) -> float:
    """Sequences of ``context`` tokens whose cache one TP group of GPUs can hold (0: none).

    Each GPU of the group stores its shard, and copies where the attention kind has fewer shards
    than ``tp``.
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
) -> float:
    unit = dtype_bytes(precision.ffn_weights)
    total = 0.0
    for group in model.groups:
        if not isinstance(group.ffn, kinds):
            continue
        if isinstance(group.ffn, MoeFfn):
            experts = math.ceil(group.ffn.experts / shards) * group.ffn.expert_parameters
            per_gpu = experts / tp + group.ffn.shared_parameters / (shards * tp)
        else:
            per_gpu = group.ffn.parameters / (shards * tp)
        total += len(group.layers) * per_gpu
    return total * unit


def _use(weights: float, accelerator: Accelerator, efficiency: Efficiency) -> MemoryUse:
    return MemoryUse(weights, accelerator.memory_bytes * efficiency.memory_use)
