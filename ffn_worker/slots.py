"""Messages of an FFN rank in memory: requests as views of its receive slots, encoded answers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from afd.config.resolve import Resolved
from afd.wire.codecs_torch import encode
from afd.wire.layout import SlotLayout
from afd.wire.message import Received
from afd.wire.slot_torch import take_bucket, take_rows
from afd.wire.slot_view_torch import RoutedRows, SlotView
from afd.wire.streams_torch import slot_bytes
from afd_comm import Region


@dataclass(frozen=True)
class EncodedAnswers:
    """Answers to all attention instances, concatenated, as the wire carries them.

    payload: [rows, hidden] in the format of the layout's tag. scales: [rows, scale columns]; None
    if the format has none.
    """

    layout: SlotLayout
    payload: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def of(cls, out: torch.Tensor, layout: SlotLayout) -> "EncodedAnswers":
        """Encodes expert outputs [rows, hidden], given in the serving dtype."""
        return cls(layout, *encode(out, layout.tag))

    def parts(self, first: int, rows: int) -> list[tuple[int, int, int]]:
        """Returns (offset in the slot, address, bytes) of each part of a message that carries
        ``rows`` rows from row ``first`` on."""
        if not rows:
            return []
        payload = self.payload[first : first + rows]
        parts = [(0, payload.data_ptr(), payload.nbytes)]
        if self.scales is not None:
            scales = self.scales[first : first + rows]
            parts.append((self.layout.scales_offset, scales.data_ptr(), scales.nbytes))
        return parts

    def copy_to(self, memory: "EncodedAnswers") -> None:
        """Copies the answers to the beginning of ``memory``.

        On a GPU by a kernel: a copy engine that waits for these rows would hold up the copies that
        send other answers.
        """
        rows = len(self.payload)
        pairs = [(self.payload, memory.payload)]
        if self.scales is not None and memory.scales is not None:
            pairs.append((self.scales, memory.scales))
        for there, to in pairs:
            words = to[:rows].view(torch.int32)
            torch.bitwise_or(there.view(torch.int32), 0, out=words)


class RankSlots:
    """The receive slots of one FFN rank, as tensors, and the slots that it answers into.

    All memory is allocated at start-up.
    """

    def __init__(self, resolved: Resolved, region: Region, number: int) -> None:
        """number: of this rank among all FFN ranks."""
        self.region = region
        self.request_layout = resolved.a2f
        self.answer_layout = resolved.f2a
        self._map = resolved.slots
        self._number = number
        self._tp = resolved.contract.ffn_tp
        self._fewest_rows = 0 if resolved.dispatch == "routed" else 1
        self._views = [
            SlotView(slot_bytes(region, slot), resolved.a2f)
            for slot in range(resolved.slots.ffn_region_slots)
        ]

    def request_slot(self, attention: int, micro_batch: int) -> int:
        """Receive slot of this rank that an attention instance writes this micro-batch into."""
        return self._map.to_ffn(attention, micro_batch)

    def answer_slot(self, micro_batch: int) -> int:
        """Receive slot of every attention instance that this rank answers a micro-batch into."""
        return self._map.to_attention(self._number, micro_batch)

    def problem(self, header: Received) -> str | None:
        """Why a message cannot be used, or None. To be called before any row of it is read."""
        layout = self.request_layout
        if not self._fewest_rows <= header.rows <= layout.capacity:
            return f"{header.rows} rows where {self._fewest_rows} to {layout.capacity} fit"
        if header.tag != layout.tag:
            return f"payload tag {header.tag} where {layout.tag.name} ({layout.tag:d}) was agreed"
        if header.nbytes != layout.message_bytes(header.rows):
            wanted = layout.message_bytes(header.rows)
            return f"{header.nbytes} bytes where {header.rows} rows make {wanted}"
        return None

    def problem_of_step(self, rows: int, depth: int, max_depth: int) -> str | None:
        """Why an announced step cannot run, or None."""
        if not 1 <= depth <= max_depth:
            return f"a step of depth {depth} where 1 to {max_depth} were agreed"
        # afd.schedule.split_rows: the last micro-batch is the largest.
        each = rows // depth
        if each < 1 or rows - (depth - 1) * each > self.request_layout.capacity:
            return f"a step of {rows} rows in {depth} micro-batches"
        return None

    def read(
        self, slots: Sequence[int], rows: Sequence[int], lost: Collection[int] = ()
    ) -> RoutedRows:
        """Returns the first ``rows[i]`` rows of each receive slot, concatenated; of a single slot,
        views.

        Args:
            lost: slots whose sender is gone. Their rows count, but no expert computes them.
        """
        views = [self._views[slot] for slot in slots]
        if len(views) == 1 and not lost:
            return RoutedRows.of(views[0], rows[0])
        taken = RoutedRows.empty_like(views[0], sum(rows))
        take_rows(views, rows, taken, [i for i, slot in enumerate(slots) if slot in lost])
        return taken

    def read_bucket(self, micro_batch: int, bucket: int, rows: torch.Tensor) -> RoutedRows:
        """Returns ``bucket`` rows of each attention rank, concatenated. No expert computes the
        rows that were not sent; see :func:`afd.wire.slot_torch.take_bucket`.

        Args:
            rows: int32 [attention ranks] on the device, the rows that each has sent.
        """
        instances = self._map.attention_ranks
        views = [self._views[self._map.to_ffn(i, micro_batch)] for i in range(instances)]
        taken = RoutedRows.empty_like(views[0], instances * bucket)
        take_bucket(views, rows, bucket, self._tp, taken)
        return taken

    def encode(self, out: torch.Tensor) -> EncodedAnswers:
        """Returns expert outputs [rows, hidden] in the format of the answers."""
        return EncodedAnswers.of(out, self.answer_layout)
