"""What an FFN rank will load and hold: its shard, backend and scheme. Reads only headers."""

from dataclasses import dataclass

import torch

from afd.models import MoeModel
from afd.placement.tables import EMPTY, Placement, contiguous, slot_bounds
from afd.topology import rank_number, shared_slice, width_slices
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK
from ffn_worker.experts.loader import Checkpoint
from ffn_worker.experts.shard import DTYPES, Shard
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.selection import Selection, select

_CPU = torch.device("cpu")
_MULTIPLE = {Scheme.PLAIN: 8, Scheme.FP8_BLOCK: SCALE_BLOCK, Scheme.MXFP4: MX_BLOCK}


@dataclass(frozen=True)
class LoadPlan:
    """Of one rank. checkpoint: None for random weights. chosen: backend and scheme."""

    checkpoint: Checkpoint | None
    model: MoeModel
    shard: Shard
    chosen: Selection

    @property
    def as_stored(self) -> bool:
        """Whether the routed experts are held with the numbers of the checkpoint."""
        if self.checkpoint is None:
            return True
        stored, scheme = self.checkpoint.format(), self.checkpoint.scheme()
        direct = scheme is not Scheme.PLAIN or not stored.is_quantised
        return direct and scheme is self.chosen.scheme

    def check(self) -> None:
        """Checks the headers of all tensors that the rank will read. Raises ConfigError."""
        assert self.checkpoint is not None
        for layer in self.model.moe_layers:
            self.checkpoint.check(self.shard, layer)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the routed experts' tensors that the rank reads, about."""
        assert self.checkpoint is not None
        part = (self.shard.width[1] - self.shard.width[0]) / self.model.moe_intermediate
        total = 0.0
        for layer in self.model.moe_layers:
            experts = [e for e in self.shard.experts[layer] if e != EMPTY]
            for mlp in self.checkpoint.experts(layer, experts):
                for weight in mlp.weights:
                    share = len(experts) / weight.stacked if weight.stacked else 1.0
                    total += part * share * weight.nbytes(self.checkpoint.table)
        return round(total)

    @property
    def held_bytes(self) -> int:
        """Bytes of all experts that the rank holds, without padding of a backend."""
        size, shard, model = DTYPES[self.model.dtype].itemsize, self.shard, self.model
        per_value = {
            Scheme.PLAIN: float(size),
            Scheme.FP8_BLOCK: 1 + 4 / SCALE_BLOCK**2,
            Scheme.MXFP4: 0.5 + 1 / MX_BLOCK,
        }[self.chosen.scheme]
        width = shard.width[1] - shard.width[0]
        routed = sum(len(experts) for experts in shard.experts.values())
        shared = 0
        if shard.shared is not None:
            shared = len(model.moe_layers) * (shard.shared[1] - shard.shared[0])
        return round(3 * model.hidden * (routed * width * per_value + shared * size))

    @property
    def text(self) -> str:
        """Says whether the experts are held as stored, with the bytes before and after."""
        chosen, after = self.chosen, f"{self.held_bytes / 1e9:.3f} GB"
        if self.checkpoint is None:
            return f"random weights, backend {chosen.backend}, {after}"
        stored = self.checkpoint.format()
        if self.as_stored:
            return f"{stored} as stored, backend {chosen.backend}, {after}"
        now = self.model.dtype if chosen.scheme is Scheme.PLAIN else chosen.scheme.value
        return (
            f"{stored} in the checkpoint, {self.stored_bytes / 1e9:.3f} GB; converted at load to "
            f"{now} for backend {chosen.backend}, {after}"
        )


def plan_load(
    checkpoint: Checkpoint | None,
    model: MoeModel,
    *,
    instances: int,
    index: int,
    tp: int = 1,
    rank: int = 0,
    placement: Placement | None = None,
    shared_by_rows: bool = False,
    backend: str = "auto",
    weights: str = "auto",
    device: torch.device = _CPU,
    pairs: float | None = None,
) -> LoadPlan:
    """Returns what rank ``rank`` of ``tp`` in FFN instance ``index`` of ``instances`` will hold.

    Arguments: as :func:`ffn_worker.experts.build.load_ffn_model`.

    Raises:
        ConfigError: see :func:`shard_of` and :func:`ffn_worker.moe.selection.select`.
    """

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
    return LoadPlan(checkpoint, model, cut_for(chosen.scheme), chosen)


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
        parts = (tp, rank) if shared_by_rows else (instances * tp, rank_number(index, rank, tp))
        shared = shared_slice(model.shared_intermediate, *parts)
    start, end = placement.range_of(index)
    tables = zip(model.moe_layers, placement.tables, strict=True)
    experts = {layer: table[start:end] for layer, table in tables}
    width = width_slices(model.moe_intermediate, tp, multiple)[rank]
    return Shard((start, end), placement.slots, experts, width, shared)
