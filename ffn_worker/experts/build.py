"""Builds the experts of an FFN rank: its shard, its weights, its backend."""

import logging
from collections.abc import Iterable, Mapping
from os import PathLike

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.models import Family, MoeModel
from afd.placement.tables import Placement
from ffn_worker.experts.banks import ExpertBanks
from ffn_worker.experts.dummy import dummy_layers
from ffn_worker.experts.gates import gated, read_gates
from ffn_worker.experts.loader import Checkpoint, Progress, ShardLoader
from ffn_worker.experts.model import FfnModel, SharedExpert, SharedExperts
from ffn_worker.experts.plan import plan_load
from ffn_worker.experts.shard import DTYPES, LayerWeights, Shard
from ffn_worker.moe.batch_selection import mean_pairs
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.selection import choose_backend

logger = logging.getLogger("afd.ffn")

_CPU = torch.device("cpu")


def build_ffn_model(
    model: MoeModel,
    shard: Shard,
    layers: Iterable[tuple[int, LayerWeights]],
    *,
    banks: Mapping[int, int] | None = None,
    shared_by_rows: bool = False,
    backend: str = "auto",
    device: torch.device = _CPU,
    scheme: Scheme = Scheme.PLAIN,
    join_shared: bool = True,
    gates: Mapping[int, torch.Tensor] | None = None,
    pairs: float | None = None,
) -> FfnModel:
    """Prepares loaded weights to compute.

    Args:
        model: shape and serving dtype.
        shard: the part of every layer that this rank holds.
        layers: global layer numbers and weights. Taken one by one, so that repacking does not
            hold two copies of all weights.
        banks: by layer number, the bank to begin with; default 0.
        shared_by_rows: see :class:`ffn_worker.experts.model.SharedExperts`.
        backend: a name of ``ffn_worker.moe.registry.BACKENDS``, or "auto".
        device: holds the weights and computes.
        scheme: the format to keep the experts in; other weights are converted.
        gates: by layer number, the gate of the shared expert (:mod:`ffn_worker.experts.gates`).
        join_shared: lets the backend compute the shared expert with the routed ones if it can.
        pairs: see :func:`ffn_worker.moe.selection.choose_backend`.

    Raises:
        ConfigError: the backend is unknown or cannot run here, or a layer is missing.
    """
    dtype, width = DTYPES[model.dtype], shard.width[1] - shard.width[0]
    name = choose_backend(
        backend, dtype, model.hidden, width, device, scheme, pairs, any_math=model.any_math
    )
    held = ExpertBanks(model, shard, name, scheme, device)
    shared: dict[int, SharedExpert] = {}
    shared_nbytes = 0
    for layer, weights in layers:
        held.add(layer, (banks or {}).get(layer, 0), shard.experts[layer], weights)
        if weights.shared_gate_up is None or weights.shared_down is None:
            continue
        gate_up, down = weights.shared_gate_up.to(device), weights.shared_down.to(device)
        shared_nbytes += gate_up.nbytes + down.nbytes
        gate = (gates or {}).get(layer)
        joins = join_shared and not shared_by_rows and gate is None
        if not joins or not held.join_shared(layer, gate_up, down):
            shared[layer] = _shared_expert(held, layer, gate_up, down, gate)
    for layer in model.moe_layers:
        if not held.of(layer):
            raise ConfigError(f"no weights were loaded for layer {layer}")
    experts = SharedExperts(shared, shared_by_rows, shared_nbytes)
    return FfnModel(model, dtype, device, name, held, experts)


def _shared_expert(
    banks: ExpertBanks, layer: int, gate_up: Weight, down: Weight, own_gate: torch.Tensor | None
) -> SharedExpert:
    """Returns a SiLU-gated MLP, every step in the serving dtype (vLLM 0.26 ``DeepseekV2MLP``)."""
    (held,) = banks.of(layer)
    first, second = (
        held.backend.linear(banks.kept(weight, Scheme.PLAIN).codes) for weight in (gate_up, down)
    )

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = first(x).chunk(2, dim=-1)
        return gated(second(F.silu(gate) * up), x, own_gate)

    return forward


def load_ffn_model(
    path: str | PathLike[str],
    family: Family,
    model: MoeModel,
    *,
    instances: int,
    index: int,
    tp: int = 1,
    rank: int = 0,
    placement: Placement | None = None,
    banks: Mapping[int, int] | None = None,
    shared_by_rows: bool = False,
    backend: str = "auto",
    device: torch.device = _CPU,
    threads: int = 4,
    progress: Progress | None = None,
    weights: str = "auto",
    dummy: bool = False,
    decode_rows: int | None = None,
) -> FfnModel:
    """Loads and prepares rank ``rank`` of ``tp`` in FFN instance ``index`` of ``instances``.

    Args:
        placement, banks, shared_by_rows: see :func:`shard_of` and :func:`build_ffn_model`.
        weights: the format to keep the experts in, a name of ``Scheme``; "auto": see
            :func:`ffn_worker.moe.selection.select`.
        dummy: random weights instead of the checkpoint's.
        decode_rows: rows of the largest decode step of all attention instances; None: unknown.

    Raises:
        ConfigError: see :func:`shard_of`, :class:`ffn_worker.experts.loader.ShardLoader` and
            :func:`build_ffn_model`.
    """
    pairs = None
    if decode_rows is not None:
        pairs = mean_pairs(decode_rows, model.top_k, model.num_experts)
    plan = plan_load(
        None if dummy else Checkpoint(path, family, model),
        model,
        instances=instances,
        index=index,
        tp=tp,
        rank=rank,
        placement=placement,
        shared_by_rows=shared_by_rows,
        backend=backend,
        weights=weights,
        device=device,
        pairs=pairs,
    )  # raises before any weight is read
    shard, scheme = plan.shard, plan.chosen.scheme
    layers: Iterable[tuple[int, LayerWeights]] = dummy_layers(model, shard, device)
    if plan.checkpoint is not None:
        # Before the read: what does not fit is explained by it.
        logger.info("experts: %s", plan.text)
        loader = ShardLoader(plan.checkpoint, shard, scheme=scheme, device=device, threads=threads)
        layers = loader.layers(progress)
    return build_ffn_model(
        model,
        shard,
        layers,
        banks=banks,
        shared_by_rows=shared_by_rows,
        backend=plan.chosen.backend,
        device=device,
        scheme=scheme,
        pairs=pairs,
        gates={} if dummy else read_gates(path, family, model, device),
    )
