"""From expert ids to expert slots: which copy of an expert computes each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from afd.config.resolve import Resolved
from afd.control.messages import Members
from afd.control.moves import in_use
from afd.placement.tables import EMPTY, Table, copies, holders
from afd.wire.streams_torch import torch_device


@dataclass(frozen=True)
class LayerSlots:
    """The slots of one layer's experts, in memory that stays where it is: a graph reads it at every
    replay, so it may change between two replays.

    of_expert: int32 [experts + 1, most copies of an expert], one slot per copy.
    count: int32 [experts + 1], the number of valid columns per row; None: an expert never has
        several copies.

    The last row serves the id -1 of a masked pair: its slot is -1.
    """

    of_expert: torch.Tensor
    count: torch.Tensor | None


class ExpertSlotMap:
    """Maps expert ids to expert slots, with one table per layer.

    instances: FFN instances that compute experts in the placement in use, ascending. All of them,
    unless they come and go.

    If an expert has several copies, the row number plus the number of the attention rank selects
    one. So the copies share the rows evenly, and senders need not agree on anything.
    """

    def __init__(self, resolved: Resolved, number: int) -> None:
        """number: of this attention rank."""
        self._resolved = resolved
        self._number = number
        self._device = torch_device(resolved.deployment.attention.device)
        self._experts = resolved.model.num_experts
        self._movable = resolved.contract.ffn_instances > 1
        # An expert has at most one copy per instance.
        spare = resolved.placement.slots - self._experts
        self._most_copies = min(resolved.contract.ffn_instances, spare + 1)
        left = (EMPTY,) * spare if resolved.contract.elastic else ()
        self._identity = (*range(self._experts), *left)
        self._known: dict[int, tuple[int, Table]] = {}
        self._in_order: set[int] = set()  # layers in which expert e is in slot e
        self._single: set[int] = set()  # layers in which no expert has several copies
        self.instances: tuple[int, ...] = tuple(range(resolved.contract.ffn_instances))
        self._layers = {layer: self._room() for layer in resolved.model.moe_layers}
        self.adopt(Members())

    def adopt(self, members: Members) -> None:
        """Uses the expert placement of this snapshot from now on. Call it between steps: it waits
        until the tables are on the device, and no step may read them meanwhile."""
        layers, placement = self._resolved.model.moe_layers, self._resolved.placement
        changed = False
        for layer, found in in_use(members, placement, layers).items():
            if self._known.get(layer) != found:
                changed, self._known[layer] = True, found
                self._in_order.discard(layer)
                self._single.discard(layer)
                if found == (0, self._identity):
                    self._in_order.add(layer)
                if self._write(self._layers[layer], *found):
                    self._single.add(layer)
        if changed and self._resolved.contract.elastic:
            tables = [table for _, table in self._known.values()]
            self.instances = holders(tables, placement.bounds)

    def of(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Returns the slots, int32 [rows, top_k], of expert ids of the same shape. -1 stays -1."""
        if layer in self._in_order:
            return ids
        return self._looked_up(layer, ids, single=layer in self._single)

    def of_replays(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Like :meth:`of`, to be captured: each replay uses the placement of its own time."""
        return self._looked_up(layer, ids) if self._movable else self.of(layer, ids)

    def _looked_up(self, layer: int, ids: torch.Tensor, *, single: bool = False) -> torch.Tensor:
        """single: no expert of the layer has several copies now."""
        slots = self._layers[layer]
        if ids.is_cuda:
            return _slots_on_gpu(ids, slots, self._number)
        if single or slots.count is None:
            return slots.of_expert[:, 0][ids]
        rows = torch.arange(self._number, self._number + len(ids), device=ids.device)
        return slots.of_expert[ids, rows.unsqueeze(1) % slots.count[ids]]

    def _room(self) -> LayerSlots:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        entries, most = self._experts + 1, self._most_copies
        return LayerSlots(zeros(entries, most), zeros(entries) if most > 1 else None)

    @torch.inference_mode()  # any thread, whatever mode the tables were made in
    def _write(self, slots: LayerSlots, bank: int, table: Table) -> bool:
        """Returns whether no expert has several copies."""
        found, most = copies(table, self._experts), self._most_copies
        offset = bank * self._resolved.placement.slots
        rows = [[offset + of[i % len(of)] for i in range(most)] for of in found]
        slots.of_expert.copy_(torch.tensor([*rows, [-1] * most], dtype=torch.int32))
        if slots.count is not None:
            slots.count.copy_(torch.tensor([*(len(of) for of in found), 1], dtype=torch.int32))
        return all(len(of) == 1 for of in found)


def _slots_on_gpu(ids: torch.Tensor, slots: LayerSlots, number: int) -> torch.Tensor:
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
            number,
            TOP_K=ids.shape[1],
            COPIES=most,
            BLOCK=block,
        )
    return out
