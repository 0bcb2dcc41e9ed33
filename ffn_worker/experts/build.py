"""Builds the experts of an FFN rank: its shard, its weights, its backend."""

import logging
from collections.abc import Iterable, Mapping
from os import PathLike

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.models import Family, MoeModel
from afd.placement.tables import Placement, contiguous, slot_bounds
from afd.topology import ffn_number, shared_slice, width_slices
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK
from ffn_worker.experts.banks import ExpertBanks
from ffn_worker.experts.dummy import dummy_layers
from ffn_worker.experts.gates import gated, read_gates
from ffn_worker.experts.loader import Checkpoint, Progress, ShardLoader
from ffn_worker.experts.model import FfnModel, SharedExpert, SharedExperts
from ffn_worker.experts.shard import DTYPES, LayerWeights, Shard
from ffn_worker.moe.batch_selection import mean_pairs
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.selection import Selection, choose_backend, select

logger = logging.getLogger("afd.ffn")

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
    checkpoint = None if dummy else Checkpoint(path, family, model)

    def cut_for(scheme: Scheme) -> Shard:
        return shard_of(
            model,
            instances,
            index,
            tp,
            rank,
            placement,
            shared_by_rows=shared_by_rows,
            multiple=_MULTIPLE[scheme],
        )

    def width_of(scheme: Scheme) -> int:
        start, end = cut_for(scheme).width
        return end - start

    pairs = None
    if decode_rows is not None:
        pairs = mean_pairs(decode_rows, model.top_k, model.num_experts)
    # Raises before any weight is read.
    chosen = select(
        backend,
        weights,
        Scheme.PLAIN if checkpoint is None else checkpoint.scheme(),
        DTYPES[model.dtype],
        model.hidden,
        width_of,
        device,
        pairs,
        any_math=model.any_math,
    )
    shard = cut_for(chosen.scheme)
    layers: Iterable[tuple[int, LayerWeights]] = dummy_layers(model, shard, device)
    loader = None
    if checkpoint is not None:
        loader = ShardLoader(
            checkpoint, shard, scheme=chosen.scheme, device=device, threads=threads
        )
        layers = loader.layers(progress)
    ffn = build_ffn_model(
        model,
        shard,
        layers,
        banks=banks,
        shared_by_rows=shared_by_rows,
        backend=chosen.backend,
        device=device,
        scheme=chosen.scheme,
        pairs=pairs,
        gates={} if dummy else read_gates(path, family, model, device),
    )
    if checkpoint is not None and loader is not None:
        logger.info("%s", _what_is_held(checkpoint, chosen, loader.bytes_read, ffn))
    return ffn


def _what_is_held(checkpoint: Checkpoint, chosen: Selection, read: int, ffn: FfnModel) -> str:
    """Says whether the experts are held as stored, with the bytes before and after."""
    stored, as_stored = checkpoint.format(), checkpoint.scheme()
    before, after = f"{read / 1e9:.3f} GB", f"{ffn.weight_bytes / 1e9:.3f} GB"
    if as_stored is chosen.scheme and (as_stored is not Scheme.PLAIN or not stored.is_quantised):
        return f"experts: {stored} as stored, backend {chosen.backend}, {after}"
    now = ffn.model.dtype if chosen.scheme is Scheme.PLAIN else chosen.scheme.value
    return (
        f"experts: {stored} in the checkpoint, {before}; converted at load to {now} for backend "
        f"{chosen.backend}, {after}"
    )
