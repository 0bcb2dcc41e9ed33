"""Typed views of an FFN instance's receive slots. All memory is made once, at start-up."""

from collections.abc import Collection, Sequence

from afd.resolve import Resolved
from afd.schedule import split_rows
from afd.wire.slot_torch import RoutedRows, SlotView, take_rows
from afd.wire.streams_torch import slot_bytes
from afd_comm import Header, Region


class Inbox:
    """The slots of all attention instances, as tensors."""

    def __init__(self, region: Region, resolved: Resolved) -> None:
        self._layout = resolved.a2f
        self._fewest = 0 if resolved.dispatch == "routed" else 1
        self._views = [
            SlotView(slot_bytes(region, slot), resolved.a2f)
            for slot in range(resolved.slots.ffn_region_slots)
        ]

    def problem(self, header: Header) -> str | None:
        """Why a message cannot be used, or None. Checked before any row of it is touched."""
        layout = self._layout
        if not self._fewest <= header.rows <= layout.capacity:
            return f"{header.rows} rows where {self._fewest} to {layout.capacity} fit"
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

    def read(
        self, slots: Sequence[int], rows: Sequence[int], masked: Collection[int] = ()
    ) -> RoutedRows:
        """Rows of several slots, one below the other; a single slot is not copied.

        Rows of ``masked`` slots are no rows that anyone sent: none of their experts is computed.
        """
        views = [self._views[slot] for slot in slots]
        if len(views) == 1 and not masked:
            return RoutedRows.of(views[0], rows[0])
        taken = RoutedRows.empty_like(views[0], sum(rows))
        take_rows(views, rows, taken, [i for i, slot in enumerate(slots) if slot in masked])
        return taken
