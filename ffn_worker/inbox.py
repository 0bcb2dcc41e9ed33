"""Typed views of an FFN instance's receive slots. All memory is made once, at start-up."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from afd.resolve import Resolved
from afd.schedule import split_rows
from afd.wire.codecs_torch import DTYPE_OF_TAG
from afd.wire.layout import TAG_OF_DTYPE
from afd.wire.slot_torch import SlotView
from afd.wire.streams_torch import slot_bytes
from afd_comm import Header, Region


@dataclass(frozen=True)
class Rows:
    """Input of one expert call: x model dtype [rows, hidden]; ids int32, weights float32
    [rows, top_k]. Views of slot memory where that is possible."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Inbox:
    """The slots of all attention instances, as tensors."""

    def __init__(self, region: Region, resolved: Resolved) -> None:
        self._layout = resolved.a2f
        self._dtype = DTYPE_OF_TAG[TAG_OF_DTYPE[resolved.model.dtype]]
        self._views = [
            SlotView(slot_bytes(region, slot), resolved.a2f)
            for slot in range(resolved.slots.ffn_region_slots)
        ]

    def problem(self, header: Header) -> str | None:
        """Why a message cannot be used, or None. Checked before any row of it is touched."""
        layout = self._layout
        if not 0 < header.rows <= layout.capacity:
            return f"{header.rows} rows where 1 to {layout.capacity} fit"
        if header.dtype != layout.tag:
            return f"payload tag {header.dtype} where {layout.tag.name} ({layout.tag:d}) was agreed"
        if header.nbytes != layout.message_bytes(header.rows):
            wanted = layout.message_bytes(header.rows)
            return f"{header.nbytes} bytes where {header.rows} rows make {wanted}"
        return None

    def problem_of_step(self, header: Header, max_depth: int) -> str | None:
        """Why an announced step cannot be run, or None."""
        if not 1 <= header.depth <= max_depth:
            return f"a step of depth {header.depth} where 1 to {max_depth} were agreed"
        parts = split_rows(header.rows, header.depth)
        if min(parts) < 1 or max(parts) > self._layout.capacity:
            return f"a step of {header.rows} rows in {header.depth} micro-batches"
        return None

    def read(self, slots: Sequence[int], rows: Sequence[int], masked: Collection[int] = ()) -> Rows:
        """Rows of several slots, one below the other; a single slot is not copied.

        Rows of ``masked`` slots are no rows that anyone sent: none of their experts is computed.
        """
        views = [(self._views[slot], n) for slot, n in zip(slots, rows, strict=True)]
        xs = [view.decode(n, self._dtype) for view, n in views]
        ids = [view.ids[:n] for view, n in views]
        for i, slot in enumerate(slots):
            if slot in masked:
                ids[i] = torch.full_like(ids[i], -1)
        weights = [view.weights[:n] for view, n in views]
        if len(slots) == 1:
            return Rows(xs[0], ids[0], weights[0])
        return Rows(torch.cat(xs), torch.cat(ids), torch.cat(weights))
