"""Slot memory as tensors, on either side of the wire."""

from collections.abc import Sequence

import torch

from afd.wire.codecs_torch import DTYPE_OF_TAG, SCALE_DTYPE
from afd.wire.layout import SlotLayout
from afd.wire.rows_torch import EncodedRows


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

    def rows(self, count: int) -> EncodedRows:
        """The first ``count`` rows of the payload: views of slot memory."""
        scales = None if self.scales is None else self.scales[:count]
        return EncodedRows(self.tag, self.payload[:count], scales)

    def decode(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The first rows of the payload in ``dtype``: slot memory itself where nothing changes."""
        return self.rows(rows).decode(dtype)


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
