"""Slot memory as tensors, on either side of the wire."""

from collections.abc import Sequence

import torch

from afd.schedule import row_shares
from afd.wire.codecs_torch import DTYPE_OF_TAG, SCALE_DTYPE, dequantise_fp8, dequantise_mxfp4
from afd.wire.layout import SlotLayout, Tag


class SlotView:
    """The parts of one slot as tensors over its memory.

    Args:
        memory: uint8 [layout.nbytes].
    """

    def __init__(self, memory: torch.Tensor, layout: SlotLayout) -> None:
        def part(offset: int, dtype: torch.dtype, row_bytes: int) -> torch.Tensor:
            nbytes = layout.capacity * row_bytes
            return memory[offset : offset + nbytes].view(dtype).view(layout.capacity, -1)

        self.tag = layout.tag
        self.payload = part(0, DTYPE_OF_TAG[layout.tag], layout.row_bytes)
        self.scales = None
        if layout.scale_columns:
            self.scales = part(
                layout.scales_offset, SCALE_DTYPE[layout.tag], layout.scale_row_bytes
            )
        self.ids = self.weights = None
        if layout.top_k:
            self.ids = part(layout.ids_offset, torch.int32, 4 * layout.top_k)
            self.weights = part(layout.weights_offset, torch.float32, 4 * layout.top_k)

    def decode(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The first rows of the payload in ``dtype``: slot memory itself where nothing changes."""
        payload = self.payload[:rows]
        if self.scales is None:
            return payload.to(dtype)
        if self.tag == Tag.E2M1:
            return dequantise_mxfp4(payload, self.scales[:rows], dtype)
        return dequantise_fp8(payload, self.scales[:rows], dtype)


def sum_of_ranks(views: Sequence[SlotView], tp: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What all FFN ranks answered to ``rows`` rows: [rows, hidden], see :func:`sum_of_parts`.

    Args:
        views: by number of the rank. Those of one instance, ``tp``, each answer a share of the rows
            (afd/schedule.py: row_shares); the instances' answers add up.
    """
    if tp == 1:
        return sum_of_parts(views, rows, dtype)
    shares = row_shares(rows, tp)
    return torch.cat(
        [
            sum_of_parts(views[rank::tp], end - start, dtype)
            for rank, (start, end) in enumerate(shares)
        ]
    )


def sum_of_parts(views: Sequence[SlotView], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What the FFN instances of one micro-batch answered, added up in float32: [rows, hidden].

    One answer that is not encoded is the slot's own memory, valid until the slot is written again.
    """
    if len(views) == 1:
        return views[0].decode(rows, dtype)
    total = views[0].decode(rows, torch.float32)
    for view in views[1:]:
        total += view.decode(rows, torch.float32)
    return total.to(dtype)
