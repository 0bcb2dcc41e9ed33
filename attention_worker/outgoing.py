"""Rows of one micro-batch as the wire carries them."""

from dataclasses import dataclass

import torch

from afd.errors import CapacityExceeded
from afd.wire import codecs_torch
from afd.wire.layout import SlotLayout


@dataclass(frozen=True)
class Outgoing:
    """One micro-batch on its way: kept until answered, because it may have to be sent again and
    because a copy that a stream was given reads it later.

    payload and scales (None: the tag has none) as the wire's tag stores them; ids int32 and weights
    float32 [rows, top_k].
    """

    layer: int
    rows: int
    payload: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor

    def parts(self, layout: SlotLayout) -> list[tuple[int, int, int]]:
        """(offset in the slot, address, bytes) of each tensor, as afd_comm takes them."""
        parts = [
            (0, self.payload.data_ptr(), self.payload.nbytes),
            (layout.ids_offset, self.ids.data_ptr(), self.ids.nbytes),
            (layout.weights_offset, self.weights.data_ptr(), self.weights.nbytes),
        ]
        if self.scales is not None:
            parts.append((layout.scales_offset, self.scales.data_ptr(), self.scales.nbytes))
        return parts


def encode(
    layout: SlotLayout,
    layer: int,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> Outgoing:
    """Bring rows into the wire's format.

    Args:
        hidden: model dtype [rows, hidden]. ids: int32 [rows, top_k], global expert ids.
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
