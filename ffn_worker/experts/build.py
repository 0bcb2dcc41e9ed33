"""Builds the experts of an FFN rank: its shard, its weights, its backend."""

from collections.abc import Mapping
from os import PathLike

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.models import Family, MoeModel
from afd.placement.tables import Placement, contiguous, slot_bounds
from afd.topology import ffn_number, shared_slice, width_slices
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK
from ffn_worker.experts.banks import ExpertBanks
from ffn_worker.experts.dummy import dummy_shard
from ffn_worker.experts.loader import (
    DTYPES,
    LayerWeights,
    Progress,
    Shard,
    load_shard,
    stored_scheme,
)
from ffn_worker.experts.model import FfnModel, SharedExpert, SharedExperts
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.selection import choose_backend

_CPU = torch.device("cpu")

_MULTIPLE = {Scheme.PLAIN: 8, Scheme.FP8_BLOCK: SCALE_BLOCK, Scheme.MXFP4: MX_BLOCK}


def shard_of(
    model: MoeModel,
    instances: int,
    index: int,
    tp: int = 1,
    rank: int = 0,
    placement: Placement | None = None,
    *,
    shared_by_rows: bool = False,
    multiple: int = 8,
) -> Shard:
    """Returns the shard of rank ``rank`` of ``tp`` in FFN instance ``index`` of ``instances``.

    Each instance holds a part of the routed experts, and each of its ranks a slice of their width.
    The shared experts' width is sliced over all ranks of all instances.

    Args:
        placement: None: the experts in order, each held once.
        shared_by_rows: the shared experts' width is sliced over the ranks of each instance only, so
            every instance holds the whole shared experts.
        multiple: columns that share a scale in the weights' format; slices end between them.

    Raises:
        ConfigError: there are more instances than routed experts, or the width cannot be divided.
    """
    if placement is None:
        bounds = slot_bounds(model.num_experts, instances, redundant=0)
        placement = contiguous(model.num_experts, bounds, len(model.moe_layers))
    shared = None
    if model.shared_intermediate:
        parts = (tp, rank) if shared_by_rows else (instances * tp, ffn_number(index, rank, tp))
        shared = shared_slice(model.shared_intermediate, *parts)
    start, end = placement.range_of(index)
    tables = zip(model.moe_layers, placement.tables, strict=True)
    experts = {layer: table[start:end] for layer, table in tables}
    width = width_slices(model.moe_intermediate, tp, multiple)[rank]
    return Shard((start, end), placement.slots, experts, width, shared)


def build_ffn_model(
    model: MoeModel,
    shard: Shard,
    layers: dict[int, LayerWeights],
    *,
    banks: Mapping[int, int] | None = None,
    shared_by_rows: bool = False,
    backend: str = "auto",
    device: torch.device = _CPU,
    scheme: Scheme = Scheme.PLAIN,
    join_shared: bool = True,
) -> FfnModel:
    """Prepares loaded weights to compute.

    Args:
        model: shape and serving dtype.
        shard: the part of every layer that this rank holds.
        layers: weights by global layer number. The dict is emptied layer by layer, so that
            repacking does not hold two copies of all weights.
        banks: by layer number, the bank to begin with; default 0.
        shared_by_rows: see :class:`ffn_worker.experts.model.SharedExperts`.
        backend: a name of ``ffn_worker.moe.registry.BACKENDS``, or "auto".
        device: holds the weights and computes.
        scheme: the format to keep the experts in; other weights are converted.
        join_shared: lets the backend compute the shared expert with the routed ones if it can.

    Raises:
        ConfigError: the backend is unknown or cannot run here, or a layer is missing.
    """
    dtype, width = DTYPES[model.dtype], shard.width[1] - shard.width[0]
    name = choose_backend(backend, dtype, model.hidden, width, device, scheme)
    held = ExpertBanks(model, shard, name, scheme, device)
    shared: dict[int, SharedExpert] = {}
    shared_nbytes = 0
    for layer in model.moe_layers:
        if layer not in layers:
            raise ConfigError(f"no weights were loaded for layer {layer}")
        weights = layers.pop(layer)
        held.add(layer, (banks or {}).get(layer, 0), shard.experts[layer], weights)
        if weights.shared_gate_up is None or weights.shared_down is None:
            continue
        gate_up, down = weights.shared_gate_up.to(device), weights.shared_down.to(device)
        shared_nbytes += gate_up.nbytes + down.nbytes
        if not join_shared or shared_by_rows or not held.join_shared(layer, gate_up, down):
            shared[layer] = _shared_expert(held, layer, gate_up, down)
    experts = SharedExperts(shared, shared_by_rows, shared_nbytes)
    return FfnModel(model, dtype, device, name, held, experts)


def _shared_expert(banks: ExpertBanks, layer: int, gate_up: Weight, down: Weight) -> SharedExpert:
    """Returns a SiLU-gated MLP, every step in the serving dtype (vLLM 0.26 ``DeepseekV2MLP``)."""
    (held,) = banks.of(layer)
    first, second = (
        held.backend.linear(banks.kept(weight, Scheme.PLAIN).codes) for weight in (gate_up, down)
    )

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = first(x).chunk(2, dim=-1)
        return second(F.silu(gate) * up)

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
) -> FfnModel:
    """Loads and prepares rank ``rank`` of ``tp`` in FFN instance ``index`` of ``instances``.

    Args:
        placement, banks, shared_by_rows: see :func:`shard_of` and :func:`build_ffn_model`.
        weights: the format to keep the experts in, a name of ``Scheme``; "auto": as stored in the
            checkpoint.
        dummy: random weights instead of the checkpoint's.

    Raises:
        ConfigError: see :func:`shard_of`, :func:`ffn_worker.experts.loader.load_shard` and
            :func:`build_ffn_model`.
    """
    if weights != "auto":
        scheme = Scheme(weights)
    else:
        scheme = Scheme.PLAIN if dummy else stored_scheme(path, family, model)
    shard = shard_of(
        model,
        instances,
        index,
        tp,
        rank,
        placement,
        shared_by_rows=shared_by_rows,
        multiple=_MULTIPLE[scheme],
    )
    # Raises before any weight is read.
    dtype, width = DTYPES[model.dtype], shard.width[1] - shard.width[0]
    choose_backend(backend, dtype, model.hidden, width, device, scheme)
    if dummy:
        layers = dummy_shard(model, shard, device)
    else:
        layers = load_shard(path, family, model, shard, threads=threads, progress=progress).layers
    return build_ffn_model(
        model,
        shard,
        layers,
        banks=banks,
        shared_by_rows=shared_by_rows,
        backend=backend,
        device=device,
        scheme=scheme,
    )
