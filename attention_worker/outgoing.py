"""Rows of one micro-batch as the wire carries them."""

from dataclasses import dataclass, replace

import torch

from afd.errors import CapacityExceeded
from afd.wire import codecs_torch
from afd.wire.layout import SlotLayout
from attention_worker.dispatch import Shares


@dataclass(frozen=True)
class Outgoing:
    """One micro-batch on its way: kept until answered, because it may have to be sent again and
    because a copy that a stream was given reads it later.

    payload and scales (None: the tag has none) as the wire's tag stores them; ids int32, of experts
    and once it is placed of their slots, -1 where nobody is to compute, and weights float32
    [rows, top_k]. shares: None where all FFN instances get all rows.
    """

    layer: int
    rows: int
    payload: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    shares: Shares | None = None

    def parts(self, layout: SlotLayout) -> list[tuple[int, int, int]]:
        """(offset in the slot, address, bytes) of each tensor, as afd_comm takes them."""
        return [(at, tensor.data_ptr(), tensor.nbytes) for at, tensor in self._tensors(layout)]

    def row_parts(self, layout: SlotLayout) -> list[tuple[int, int, int]]:
        """(offset in the slot, address of the first row, bytes of a row) of each tensor; nothing
        where nobody gets a row: no bytes have no address."""
        if not len(self.ids):
            return []
        return [
            (at, tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
            for at, tensor in self._tensors(layout)
        ]

    def placed(self, slots: torch.Tensor) -> "Outgoing":
        """The same with the slots, int32 [rows, top_k], in the place of the experts' ids."""
        return replace(self, ids=slots)

    def dealt(self, shares: Shares) -> "Outgoing":
        """The same rows laid out by FFN rank; a row that several get is there several times."""
        rows = shares.in_order()
        scales = None if self.scales is None else self.scales[rows]
        return Outgoing(
            self.layer,
            self.rows,
            self.payload[rows],
            scales,
            self.ids[rows],
            self.weights[rows],
            shares,
        )

    def _tensors(self, layout: SlotLayout) -> list[tuple[int, torch.Tensor]]:
        tensors = [
            (0, self.payload),
            (layout.ids_offset, self.ids),
            (layout.weights_offset, self.weights),
        ]
        if self.scales is not None:
            tensors.append((layout.scales_offset, self.scales))
        return tensors


def encode(
    layout: SlotLayout,
    layer: int,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> Outgoing:
    """Bring rows into the wire's format.

    Args:
        hidden: model dtype [rows, hidden]. ids: int32 [rows, top_k], experts or their slots.
        weights: float32 [rows, top_k].

    Raises:
        CapacityExceeded: more rows than a slot holds.
    """
    rows = hidden.shape[0]
    if rows > layout.capacity:
        raise CapacityExceeded(
            f"a micro-batch of {rows} rows exceeds the slot capacity of {layout.capacity} rows; "
            "raise attention.max_num_batched_tokens (it sets the capacity) on every role"
        )
    payload, scales = codecs_torch.encode(hidden, layout.tag)
    return Outgoing(layer, rows, payload, scales, ids, weights)
