"""Which slot computes each of a row's experts, and which rows every FFN instance gets."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from afd.control.messages import Members
from afd.control.moves import in_use
from afd.placement import Table, copies
from afd.resolve import Resolved
from afd.wire.streams_torch import torch_device


@dataclass(frozen=True)
class _Slots:
    """One layer. of_expert: int32 [experts + 1, most copies], a slot per copy. count: int32
    [experts + 1], how many of them are meant; None: one of each. The last entry of both is what the
    id -1 of a masked pair finds: the slot -1."""

    of_expert: torch.Tensor
    count: torch.Tensor | None


class ExpertSlots:
    """Turns expert ids into slots, by a table per layer.

    Of several copies a row's number picks one, shifted by the attention instance's, so that copies
    share the rows evenly and every sender knows where each pair goes without asking.

    Args:
        index: of this attention instance.
    """

    def __init__(self, resolved: Resolved, index: int) -> None:
        self._resolved = resolved
        self._index = index
        self._device = torch_device(resolved.deployment.attention.device)
        self._in_order = tuple(range(resolved.model.num_experts))
        self._known: dict[int, tuple[int, Table]] = {}
        self._layers: dict[int, _Slots | None] = {}
        self.adopt(Members())

    def adopt(self, members: Members) -> None:
        """From now on experts are found where the control plane says they are; between steps."""
        layers, placement = self._resolved.model.moe_layers, self._resolved.placement
        for layer, found in in_use(members, placement, layers).items():
            if self._known.get(layer) != found:
                self._known[layer] = found
                self._layers[layer] = self._slots(*found)

    def _slots(self, bank: int, table: Table) -> _Slots | None:
        if bank == 0 and table == self._in_order:
            return None  # the slot of an expert is its number
        found = copies(table, len(self._in_order))
        most = max(len(slots) for slots in found)
        offset = bank * self._resolved.placement.slots
        rows = [[offset + slots[i % len(slots)] for i in range(most)] for slots in found]
        of_expert = self._tensor([*rows, [-1] * most])
        if most == 1:
            return _Slots(of_expert, None)
        return _Slots(of_expert, self._tensor([*(len(slots) for slots in found), 1]))

    def of(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Slots int32 [rows, top_k] of expert ids of that shape; of the id -1 the slot -1."""
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


def _slots_on_gpu(ids: torch.Tensor, slots: _Slots, index: int) -> torch.Tensor:
    """What :meth:`ExpertSlots.of` answers, by one kernel."""
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


@dataclass(frozen=True)
class Shares:
    """Rows of one micro-batch by FFN instance. rows: int64, those of the first instance, then those
    of the second, and so on, ascending each. counts: how many each gets. tp: ranks of an instance,
    each of which gets all of its instance's rows."""

    rows: torch.Tensor
    counts: tuple[int, ...]
    tp: int

    def of_instances(self) -> tuple[torch.Tensor, ...]:
        """The rows of each instance."""
        return self.rows.split(self.counts)

    def of_ranks(self) -> list[int]:
        """Number of rows that each rank gets, instance by instance."""
        return [rows for rows in self.counts for _ in range(self.tp)]

    def in_order(self) -> torch.Tensor:
        """Rows in the order in which ranks get them, int64 [sum of :meth:`of_ranks`]."""
        if self.tp == 1:
            return self.rows
        return torch.cat([part for part in self.of_instances() for _ in range(self.tp)])


class Splitter:
    """Finds the rows that every FFN instance computes an expert of.

    The reference is :func:`afd.dispatch.rows_of_instances`.
    """

    def __init__(self, bounds: Sequence[int], tp: int, device: str) -> None:
        """bounds: instance j holds slots [bounds[j], bounds[j + 1]), in either bank. tp: ranks of
        an instance."""
        self._tp = tp
        self._instances = len(bounds) - 1
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        one_bank = torch.arange(self._instances).repeat_interleave(torch.tensor(sizes))
        # The last entry is what the slot -1 of a masked pair finds: an instance beyond the last.
        nobody = torch.tensor([self._instances])
        self._instance_of = torch.cat([one_bank, one_bank, nobody]).to(device)

    def split(self, slots: torch.Tensor) -> Shares:
        """slots: int32 [rows, top_k], see :meth:`ExpertSlots.of`. Waits for the device."""
        shape = (len(slots), self._instances + 1)
        gets = torch.zeros(shape, dtype=torch.bool, device=slots.device)
        gets = gets.scatter_(1, self._instance_of[slots], True)[:, :-1]
        _, rows = gets.t().nonzero(as_tuple=True)
        return Shares(rows, tuple(gets.sum(dim=0).tolist()), self._tp)
