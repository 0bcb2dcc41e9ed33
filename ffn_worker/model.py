"""The experts of one FFN instance, ready to compute."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.models import Family, MoeModel
from afd.placement import Placement, contiguous, slot_bounds
from afd.topology import ffn_number, shared_slice, width_slices
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.dummy import dummy_shard
from ffn_worker.load import SlotLoad
from ffn_worker.loader import DTYPES, LayerWeights, Progress, Shard, load_shard, stored_scheme
from ffn_worker.moe import BACKENDS, Linear, Scheme, choose_backend
from ffn_worker.moe.device import launched_as
from ffn_worker.moe.quantise import Weight, in_scheme

_CPU = torch.device("cpu")
SharedExpert = Callable[[torch.Tensor], torch.Tensor]

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
    """Shard of rank `rank` of `tp` in FFN instance `index` of `instances`.

    The instances share the routed experts out, the ranks of one the width of each of these. The
    shared experts' width is shared out among all, or among the ranks of every instance.

    Args:
        placement: None: the experts in order, each held once.
        shared_by_rows: every instance holds the shared experts whole.
        multiple: columns that share a scale in the weights' format; ranks do not cut them.

    Raises:
        ConfigError: more instances than routed experts, or a width that cannot be cut.
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


@dataclass(frozen=True)
class _Held:
    """The experts in this instance's slots of one layer, the bank that they are in, and what they
    have computed."""

    bank: int
    experts: tuple[int, ...]
    nbytes: int
    load: SlotLoad


@dataclass(frozen=True)
class _Layer:
    """held: one bank, or both while experts move. past: by expert, rows that were computed in
    banks that are dropped. Replaced as a whole: another thread may read it."""

    held: tuple[_Held, ...]
    past: tuple[int, ...]


class FfnModel:
    """MoE layers of one rank of an FFN instance; the outputs of all ranks of all instances add up
    to the full FFN output.

    A layer's routed experts lie in one of two banks. While experts move, the layer has its old ones
    in one bank and the new ones in the other, and the ids of a row say which are meant: in bank 1
    slots are counted from `shard.all_slots` on.

    Args:
        model: shape and serving dtype.
        shard: what this instance holds.
        layers: weights by global layer number; consumed (emptied), so that repacking them does
            not hold two copies of everything.
        banks: by layer number, the bank to begin with; 0 where it is not named.
        shared_by_rows: the shared experts are computed for the rows whose first expert this
            instance computes; otherwise `shard.shared`, a slice, for every row.
        backend: a name of `ffn_worker.moe.BACKENDS`, or "auto".
        device: where the weights are kept and the experts computed.
        scheme: the format to keep the experts in; other weights are brought into it.
        join_shared: let a backend that can compute the shared expert with the routed ones do so.

    Raises:
        ConfigError: the backend is unknown or cannot run here, or a layer is missing.
    """

    def __init__(
        self,
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
    ) -> None:
        self.model = model
        self.device = device
        self.shard = shard
        self.dtype = DTYPES[model.dtype]
        self.scheme = scheme
        self.weight_bytes = 0
        self.backend_name = choose_backend(
            backend, self.dtype, model.hidden, shard.width[1] - shard.width[0], device, scheme
        )
        kind = BACKENDS[self.backend_name]
        self._banks = tuple(kind(shard.slots, shard.all_slots) for _ in range(2))
        self._layers = {n: _Layer((), (0,) * model.num_experts) for n in model.moe_layers}
        self._shared: dict[int, SharedExpert] = {}
        self._shared_by_rows = shared_by_rows
        self._joined: set[int] = set()  # layers whose shared expert the backend computes
        for layer in model.moe_layers:
            if layer not in layers:
                raise ConfigError(f"no weights were loaded for layer {layer}")
            weights = layers.pop(layer)
            self.add(layer, (banks or {}).get(layer, 0), shard.experts[layer], weights)
            self._add_shared(layer, weights, join_shared and not shared_by_rows)

    def add(self, layer: int, bank: int, experts: tuple[int, ...], weights: LayerWeights) -> None:
        """Take over the routed experts of one layer, beside those that it has in the other bank.

        May be called from another thread than `forward`'s.

        Args:
            experts: routed expert in each of this instance's slots, as in `weights`.
        """
        assert layer not in self._joined, "the shared expert is in the bank that would be dropped"
        w13, w2 = self._kept(weights.w13, self.scheme), self._kept(weights.w2, self.scheme)
        nbytes = w13.nbytes + w2.nbytes
        self._banks[bank].prepare(layer, w13, w2)
        held = _Held(bank, experts, nbytes, SlotLoad(experts, self.shard.slots[0], self.device))
        known = self._layers[layer]
        self._layers[layer] = replace(known, held=(*known.held, held))
        self.weight_bytes += nbytes

    def drop(self, layer: int, bank: int) -> None:
        """Forget one bank of a layer; between two calls of `forward`."""
        known = self._layers[layer]
        (gone,) = (held for held in known.held if held.bank == bank)
        kept = tuple(held for held in known.held if held is not gone)
        self._layers[layer] = _Layer(kept, gone.load.added_to(known.past))
        self.weight_bytes -= gone.nbytes
        self._banks[bank].release(layer)

    def held(self, layer: int) -> dict[int, tuple[int, ...]]:
        """By bank, the experts in this instance's slots of a layer."""
        return {held.bank: held.experts for held in self._layers[layer].held}

    def holds(self, layer: int, topk_ids: torch.Tensor) -> bool:
        """Whether the banks that these ids mean are held. Waits for the device."""
        banks = {int(n) // self.shard.all_slots for n in torch.aminmax(topk_ids) if n >= 0}
        return banks <= set(self.held(layer))

    def expert_rows(self) -> dict[int, tuple[int, ...]]:
        """By layer, how many rows each routed expert has computed here. Any thread."""
        rows = {}
        for number, layer in list(self._layers.items()):
            rows[number] = layer.past
            for held in layer.held:
                rows[number] = held.load.added_to(rows[number])
        return rows

    def _add_shared(self, layer: int, weights: LayerWeights, join: bool) -> None:
        if weights.shared_gate_up is None or weights.shared_down is None:
            return
        (bank,) = (self._banks[number] for number in self.held(layer))
        shared = weights.shared_gate_up.to(self.device), weights.shared_down.to(self.device)
        self.weight_bytes += sum(weight.nbytes for weight in shared)
        if join and bank.prepare_shared(layer, *shared):
            self._joined.add(layer)
            return
        gate_up, down = (self._kept(weight, Scheme.PLAIN).codes for weight in shared)
        self._shared[layer] = _shared_expert(bank.linear(gate_up), bank.linear(down))

    def _kept(self, weight: Weight, scheme: Scheme) -> Weight:
        return in_scheme(weight.to(self.device), scheme, self._banks[0].fp8, self.dtype)

    @property
    def capturable(self) -> bool:
        """Whether :meth:`forward` may be captured in a graph: no host wait, no data-dependent
        shape."""
        return self._banks[0].capturable

    @property
    def joins_shared(self) -> bool:
        """Whether the backend computes the shared expert of some layer with the routed ones."""
        return bool(self._joined)

    @torch.inference_mode()
    def warm_up(self, rows: int, tag: Tag) -> torch.Tensor:
        """One call of ``rows`` rows that come as ``tag``, and where it may be captured one as for a
        graph, so that their kernels are compiled and chosen; the output. The rows are not counted
        as load."""
        layer, kinds = self.model.moe_layers[0], self.model.top_k
        zeros = torch.zeros((rows, self.model.hidden), dtype=self.dtype, device=self.device)
        x = EncodedRows.of(zeros, tag)
        ids = torch.arange(rows * kinds, dtype=torch.int32, device=self.device)
        ids = (ids % self.shard.all_slots).view(rows, kinds)
        weights = torch.ones_like(ids, dtype=torch.float32)
        first, *others = self._layers[layer].held
        uncounted = SlotLoad(first.experts, self.shard.slots[0], self.device)
        first = replace(first, load=uncounted)
        out = self._forward(layer, x, ids, weights, first, *others)
        if self.capturable:
            with launched_as("graph"):
                out = self._forward(layer, x, ids, weights, first, *others)
        return out

    @torch.inference_mode()
    def forward(
        self,
        layer: int,
        x: EncodedRows | torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """This rank's part of the FFN output of one layer.

        routed_scaling * (sum of local routed experts) + local part of the shared experts, in the
        order and dtype of vLLM 0.26 (moe_runner.py, `forward`), but for a backend that computes the
        shared expert with the routed ones: that adds in float32 and rounds once. Summed over ranks
        and instances it is the full output, up to rounding.

        Args:
            layer: global layer number, one of `model.moe_layers`.
            x: [rows, hidden] as the wire brings them, or a tensor in the serving dtype;
                contiguous, not modified.
            topk_ids: [rows, top_k] int32 slots of the deployment (afd/placement.py), negative where
                masked; in bank 1 they are counted from `shard.all_slots` on.
            topk_weights: [rows, top_k] float32.

        Returns:
            A new tensor [rows, hidden] in the serving dtype.
        """
        rows = EncodedRows.of(x) if isinstance(x, torch.Tensor) else x
        return self._forward(layer, rows, topk_ids, topk_weights, *self._layers[layer].held)

    def _forward(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        first: _Held,
        *others: _Held,
    ) -> torch.Tensor:
        if layer in self._shared and not self._banks[0].takes_encoded:
            rows = EncodedRows.of(rows.decode(self.dtype))  # once for both
        scaling = self.model.routed_scaling
        if layer in self._joined and scaling != 1.0:
            topk_weights, scaling = topk_weights * scaling, 1.0
        out = self._routed(first, layer, rows, topk_ids, topk_weights, alone=not others)
        for held in others:
            out += self._routed(held, layer, rows, topk_ids, topk_weights, alone=False)
        if scaling != 1.0:
            out *= scaling
        if layer in self._shared:
            plain = rows.decode(self.dtype)
            if self._shared_by_rows:
                led = self._rows_led(topk_ids)
                out[led] += self._shared[layer](plain[led])
            else:
                out += self._shared[layer](plain)
        return out

    def _routed(
        self,
        held: _Held,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        alone: bool,
    ) -> torch.Tensor:
        """The experts of one bank. A row's experts of a layer are all in the same bank."""
        ids = topk_ids
        if held.bank:
            ids = ids - self.shard.all_slots  # those of bank 0 become negative
        elif not alone:
            ids = torch.where(ids < self.shard.all_slots, ids, -1)
        bank = self._banks[held.bank]
        return bank.forward_encoded(layer, rows, ids, topk_weights, self.dtype, held.load)

    def _rows_led(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Rows whose first expert is computed here, int64."""
        first = topk_ids[:, 0]
        slot = first % self.shard.all_slots
        start, end = self.shard.slots
        return ((first >= 0) & (slot >= start) & (slot < end)).nonzero().squeeze(1)


def _shared_expert(gate_up: Linear, down: Linear) -> SharedExpert:
    """SiLU-gated MLP, every step in the serving dtype (vLLM 0.26 `DeepseekV2MLP`)."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(F.silu(gate) * up)

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
    movable: bool = False,
    backend: str = "auto",
    device: torch.device = _CPU,
    threads: int = 4,
    progress: Progress | None = None,
    weights: str = "auto",
    dummy: bool = False,
) -> FfnModel:
    """Loads and prepares rank `rank` of `tp` in FFN instance `index` of `instances`.

    Args:
        placement, banks, shared_by_rows: see :func:`shard_of` and :class:`FfnModel`.
        movable: experts may move while the model serves.
        weights: the format to keep the experts in, a name of `Scheme`; "auto": as the checkpoint
            stores them. dummy: random weights instead of the checkpoint's.

    Raises:
        ConfigError: see the parts.
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
    # Before anything is read.
    dtype, width = DTYPES[model.dtype], shard.width[1] - shard.width[0]
    choose_backend(backend, dtype, model.hidden, width, device, scheme)
    if dummy:
        layers = dummy_shard(model, shard, device)
    else:
        layers = load_shard(path, family, model, shard, threads=threads, progress=progress).layers
    return FfnModel(
        model,
        shard,
        layers,
        banks=banks,
        shared_by_rows=shared_by_rows,
        backend=backend,
        device=device,
        scheme=scheme,
        join_shared=not movable,
    )
