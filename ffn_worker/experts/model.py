"""The experts of an FFN rank: computes the rows of one expert call.

:mod:`ffn_worker.experts.build` makes an :class:`FfnModel`, :mod:`ffn_worker.experts.banks` holds
the routed experts, and :mod:`ffn_worker.experts.moves` changes them while the rank serves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from afd.models import MoeModel
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.experts.banks import ExpertBanks, HeldBank
from ffn_worker.experts.shard import Shard
from ffn_worker.moe.device import launched_as
from ffn_worker.moe.load_counts import SlotLoad

SharedExpert = Callable[[torch.Tensor], torch.Tensor]
"""From rows [rows, hidden] to the shared expert's output for them, both in the serving dtype."""


@dataclass(frozen=True)
class SharedExperts:
    """The shared experts that this rank computes apart from the routed ones.

    of_layer: by layer number. Without the layers of ``ExpertBanks.joined``.
    by_rows: True: each row's shared experts are computed by one instance, the one that computes the
        row's first routed expert. False: every instance computes its slice of them for all rows.
    nbytes: of the weights of all shared experts, including those in ``ExpertBanks.joined``.
    """

    of_layer: Mapping[int, SharedExpert]
    by_rows: bool
    nbytes: int


@dataclass(eq=False)
class FfnModel:
    """The MoE layers of one rank of an FFN instance. The outputs of all ranks of all instances add
    up to the full FFN output.

    dtype: the serving dtype. backend_name: of ``ffn_worker.moe.registry.BACKENDS``.
    """

    model: MoeModel
    dtype: torch.dtype
    device: torch.device
    backend_name: str
    banks: ExpertBanks
    shared: SharedExperts

    @torch.inference_mode()
    def forward(
        self,
        layer: int,
        x: EncodedRows | torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Returns this rank's part of the FFN output of one layer.

        Computes routed_scaling * (sum of the local routed experts) + local part of the shared
        experts, in the order and dtype of vLLM 0.26 (moe_runner.py, ``forward``). A backend that
        computes the shared expert with the routed ones adds in float32 and rounds once instead. The
        parts of all ranks and instances add up to the full output, up to rounding.

        Args:
            layer: global layer number, one of ``model.moe_layers``.
            x: [rows, hidden] in the wire's format, or a tensor in the serving dtype; contiguous,
                not modified.
            slots: int32 [rows, top_k], expert slots of the deployment (afd/placement/tables.py).
                Negative: no expert computes the pair. All experts of a row are in the same bank;
                expert slots of bank 1 start at ``shard.total_slots``.
            weights: float32 [rows, top_k].

        Returns:
            A new tensor [rows, hidden] in the serving dtype.
        """
        rows = EncodedRows.of(x) if isinstance(x, torch.Tensor) else x
        return self._forward(layer, rows, slots, weights, self.banks.of(layer))

    def _forward(
        self,
        layer: int,
        rows: EncodedRows,
        slots: torch.Tensor,
        weights: torch.Tensor,
        held: Sequence[HeldBank],
    ) -> torch.Tensor:
        shared = self.shared.of_layer.get(layer)
        if shared is not None and not held[0].backend.takes_encoded:
            rows = EncodedRows.of(rows.decode(self.dtype))  # once for routed and shared experts
        scaling, inputs = self.model.routed_scaling, rows
        if self.model.weight_on_input:  # top_k is 1
            inputs = EncodedRows.of(rows.decode(self.dtype) * weights.to(self.dtype))
            weights = torch.ones_like(weights)
        if layer in self.banks.joined and scaling != 1.0:
            weights, scaling = weights * scaling, 1.0
        out = self._routed(held[0], layer, inputs, slots, weights, alone=len(held) == 1)
        for other in held[1:]:
            out += self._routed(other, layer, inputs, slots, weights, alone=False)
        if scaling != 1.0:
            out *= scaling
        if shared is not None:
            plain = rows.decode(self.dtype)
            if not self.shared.by_rows:
                out += shared(plain)
            elif self.capturable:  # all rows, because the shape must not depend on the data
                mine = self._first_here(slots).unsqueeze(1)
                out += torch.where(mine, shared(plain), 0.0)
            else:
                mine = self._first_here(slots).nonzero().squeeze(1)
                out[mine] += shared(plain[mine])
        return out

    def _routed(
        self,
        held: HeldBank,
        layer: int,
        rows: EncodedRows,
        slots: torch.Tensor,
        weights: torch.Tensor,
        *,
        alone: bool,
    ) -> torch.Tensor:
        """Returns the sum of the experts of one bank; 0 for rows whose experts are in the other.

        alone: the layer has no other bank, so all rows name this one.
        """
        total = self.shard.total_slots
        if alone:
            # The same operation for both banks: a graph must not know which of them is at home.
            # Rounds towards zero, so a masked slot stays negative.
            slots = torch.fmod(slots, total) if self.shard.slots != (0, total) else slots
        elif held.number == 1:
            slots = slots - total  # slots of bank 0 become negative: not computed
        else:
            slots = torch.where(slots < total, slots, -1)
        return held.backend.forward_encoded(layer, rows, slots, weights, self.dtype, held.load)

    def _first_here(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns bool [rows]: whether the row's first expert is computed here."""
        first = slots[:, 0]
        slot = first % self.shard.total_slots
        start, end = self.shard.slots
        return (first >= 0) & (slot >= start) & (slot < end)

    @property
    def shard(self) -> Shard:
        """The part of every layer that this rank holds."""
        return self.banks.shard

    @property
    def weight_bytes(self) -> int:
        return self.banks.nbytes + self.shared.nbytes

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold :meth:`forward`: no wait on the host, no shape that depends on
        data."""
        return self.banks.capturable

    @torch.inference_mode()
    def warm_up(self, rows: int, tag: Tag) -> torch.Tensor:
        """Compiles and selects the kernels for ``rows`` rows in format ``tag``; returns the output.

        Runs one call, and if it can be captured one more with the backend selection for graphs.
        The rows do not count as load.
        """
        layer, top_k = self.model.moe_layers[0], self.model.top_k
        zeros = torch.zeros((rows, self.model.hidden), dtype=self.dtype, device=self.device)
        x = EncodedRows.of(zeros, tag)
        slots = torch.arange(rows * top_k, dtype=torch.int32, device=self.device)
        slots = (slots % self.shard.total_slots).view(rows, top_k)
        weights = torch.ones_like(slots, dtype=torch.float32)
        first, *others = self.banks.of(layer)
        uncounted = SlotLoad(first.experts, self.shard.slots[0], self.device)
        held = (replace(first, load=uncounted), *others)
        out = self._forward(layer, x, slots, weights, held)
        if self.capturable:
            with launched_as("graph"):
                out = self._forward(layer, x, slots, weights, held)
        return out
