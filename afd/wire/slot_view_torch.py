"""Slot memory as tensors: the parts of one slot, and the routed rows of one message."""

from dataclasses import dataclass

import torch

from afd.wire.dtypes_torch import DTYPE_OF_TAG, SCALE_DTYPE
from afd.wire.layout import SlotLayout
from afd.wire.rows_torch import EncodedRows

MOST = 8
"""Most messages that one kernel takes or adds up."""


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
        self.hidden = layout.hidden
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
        """Return the first ``count`` rows of the payload as views of slot memory."""
        scales = None if self.scales is None else self.scales[:count]
        return EncodedRows(self.tag, self.payload[:count], scales)

    def decode(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode the first rows of the payload to ``dtype``; slot memory if nothing changes."""
        return self.rows(rows).decode(dtype)


@dataclass(frozen=True)
class RoutedRows:
    """Input of one expert call: x [rows, hidden] in wire format; ids int32, weights float32
    [rows, top_k]. Views of slot memory if possible."""

    x: EncodedRows
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, view: SlotView, rows: int) -> "RoutedRows":
        """Return the first rows of one message as views of slot memory."""
        assert view.ids is not None and view.weights is not None, "an answer has no ids"
        return cls(view.rows(rows), view.ids[:rows], view.weights[:rows])

    @classmethod
    def empty_like(cls, view: SlotView, rows: int) -> "RoutedRows":
        """Allocate memory for ``rows`` rows in the format of a slot."""

        def room(part: torch.Tensor) -> torch.Tensor:
            return torch.empty((rows, part.shape[1]), dtype=part.dtype, device=part.device)

        assert view.ids is not None and view.weights is not None, "an answer has no ids"
        scales = None if view.scales is None else room(view.scales)
        x = EncodedRows(view.tag, room(view.payload), scales)
        return cls(x, room(view.ids), room(view.weights))

    def copy_(self, rows: "RoutedRows") -> None:
        """Copy as many rows of the same format."""
        self.x.payload.copy_(rows.x.payload)
        if self.x.scales is not None and rows.x.scales is not None:
            self.x.scales.copy_(rows.x.scales)
        self.ids.copy_(rows.ids)
        self.weights.copy_(rows.weights)

    def cut(self, begin: int, end: int) -> "RoutedRows":
        """Return rows [begin, end) as views."""
        x, scales = self.x, None if self.x.scales is None else self.x.scales[begin:end]
        x = EncodedRows(x.tag, x.payload[begin:end], scales)
        return RoutedRows(x, self.ids[begin:end], self.weights[begin:end])
