"""From expert ids to expert slots: which copy of an expert computes each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from afd.config.resolve import Resolved
from afd.control.messages import Members
from afd.control.moves import in_use
from afd.placement.tables import Table, copies
from afd.wire.streams_torch import torch_device


@dataclass(frozen=True)
class LayerSlots:
    """The slots of one layer's experts.

    of_expert: int32 [experts + 1, most copies of an expert], one slot per copy.
    count: int32 [experts + 1], the number of valid columns per row; None: one each.

    The last row serves the id -1 of a masked pair: its slot is -1.
    """

    of_expert: torch.Tensor
    count: torch.Tensor | None


class ExpertSlotMap:
    """Maps expert ids to expert slots, with one table per layer.

    If an expert has several copies, the row number plus the index of the attention instance selects
    one. So the copies share the rows evenly, and senders need not agree on anything.
    """

    def __init__(self, resolved: Resolved, index: int) -> None:
        """index: of this attention instance."""
        self._resolved = resolved
        self._index = index
        self._device = torch_device(resolved.deployment.attention.device)
        self._identity = tuple(range(resolved.model.num_experts))
        self._known: dict[int, tuple[int, Table]] = {}
        self._layers: dict[int, LayerSlots | None] = {}
        self.adopt(Members())

    def adopt(self, members: Members) -> None:
        """Uses the expert placement of this snapshot from now on. Call it between steps."""
        layers, placement = self._resolved.model.moe_layers, self._resolved.placement
        for layer, found in in_use(members, placement, layers).items():
            if self._known.get(layer) != found:
                self._known[layer] = found
                self._layers[layer] = self._layer_slots(*found)

    def _layer_slots(self, bank: int, table: Table) -> LayerSlots | None:
        if bank == 0 and table == self._identity:
            return None  # expert e is in slot e
        found = copies(table, len(self._identity))
        most = max(len(slots) for slots in found)
        offset = bank * self._resolved.placement.slots
        rows = [[offset + slots[i % len(slots)] for i in range(most)] for slots in found]
        of_expert = self._tensor([*rows, [-1] * most])
        if most == 1:
            return LayerSlots(of_expert, None)
        return LayerSlots(of_expert, self._tensor([*(len(slots) for slots in found), 1]))

    def of(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Returns the slots, int32 [rows, top_k], of expert ids of the same shape. -1 stays -1."""
        slots = self._layers[layer]
        if slots is None:
            return ids
        if ids.is_cuda:
            return _slots_on_gpu(ids, slots, self._index)
        if slots.count is None:
            return slots.of_expert[:, 0][ids]
        rows = torch.arange(self._index, self._index + len(ids), device=ids.device)
        return slots.of_expert[ids, rows.unsqueeze(1) % slots.count[ids]]

    def _tensor(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def _slots_on_gpu(ids: torch.Tensor, slots: LayerSlots, index: int) -> torch.Tensor:
    """:meth:`ExpertSlotMap.of` as one kernel launch."""
    from attention_worker.kernels.slots import expert_slots_kernel

    out, block = torch.empty_like(ids), 256
    last, most = slots.of_expert.shape
    if pairs := ids.numel():
        expert_slots_kernel[(-(-pairs // block),)](
            ids,
            slots.of_expert,
            slots.of_expert if slots.count is None else slots.count,
            out,
            pairs,
            last - 1,
            index,
            TOP_K=ids.shape[1],
            COPIES=most,
            BLOCK=block,
        )
    return out
