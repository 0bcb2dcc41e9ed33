"""Slot memory as tensors, on either side of the wire."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from afd.schedule import row_shares
from afd.wire.codecs_torch import DTYPE_OF_TAG, SCALE_DTYPE
from afd.wire.layout import SlotLayout, Tag
from afd.wire.rows_torch import EncodedRows

MOST = 8
"""Messages that one kernel takes or adds up."""


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


@dataclass(frozen=True)
class RoutedRows:
    """Input of one expert call: x [rows, hidden] in the wire's format; ids int32, weights float32
    [rows, top_k]. Views of slot memory where that is possible."""

    x: EncodedRows
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, view: SlotView, rows: int) -> "RoutedRows":
        """The first rows of one message: views of slot memory."""
        assert view.ids is not None and view.weights is not None, "an answer has no ids"
        return cls(view.rows(rows), view.ids[:rows], view.weights[:rows])

    @classmethod
    def empty_like(cls, view: SlotView, rows: int) -> "RoutedRows":
        """Memory for rows as they lie in a slot."""

        def room(part: torch.Tensor) -> torch.Tensor:
            return torch.empty((rows, part.shape[1]), dtype=part.dtype, device=part.device)

        assert view.ids is not None and view.weights is not None, "an answer has no ids"
        scales = None if view.scales is None else room(view.scales)
        x = EncodedRows(view.tag, room(view.payload), scales)
        return cls(x, room(view.ids), room(view.weights))

    def cut(self, begin: int, end: int) -> "RoutedRows":
        """Rows [begin, end): views."""
        x, scales = self.x, None if self.x.scales is None else self.x.scales[begin:end]
        x = EncodedRows(x.tag, x.payload[begin:end], scales)
        return RoutedRows(x, self.ids[begin:end], self.weights[begin:end])


def take_rows(
    views: Sequence[SlotView], counts: Sequence[int], into: RoutedRows, masked: Collection[int] = ()
) -> None:
    """Copy the first ``counts[i]`` rows of each message i, one below the other.

    On a GPU by one kernel (:mod:`afd.wire.slot_gpu_torch`).

    Args:
        views: slots of one region. into: contiguous, of at least as many rows; those behind stay.
        masked: indices of messages that nobody sent: none of their experts is to be computed, so
            their ids become -1.
    """
    if views[0].payload.is_cuda:
        from afd.wire import slot_gpu_torch as gpu

        gpu.take_rows(views, counts, into, masked)
        return
    begin = 0
    for i, (view, rows) in enumerate(zip(views, counts, strict=True)):
        here, sent = into.cut(begin, begin + rows), RoutedRows.of(view, rows)
        here.x.payload.copy_(sent.x.payload)
        if here.x.scales is not None and sent.x.scales is not None:
            here.x.scales.copy_(sent.x.scales)
        here.weights.copy_(sent.weights)
        if i in masked:
            here.ids.fill_(-1)
        else:
            here.ids.copy_(sent.ids)
        begin += rows


def sum_of_shares(
    views: Sequence[SlotView],
    tp: int,
    shares: Sequence[torch.Tensor],
    rows: int,
    hidden: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As :func:`sum_of_ranks`, bit for bit, where FFN instance j answered the rows shares[j].

    Args:
        shares: int64 [rows of j], each row at most once. A row that nobody answered is 0.
    """
    device = views[0].payload.device
    total = torch.zeros((rows, hidden), dtype=torch.float32, device=device)
    for j, share in enumerate(shares):
        for rank, (start, end) in enumerate(row_shares(len(share), tp)):
            answer = views[j * tp + rank].decode(end - start, torch.float32)
            total.index_add_(0, share[start:end], answer)
    return total.to(dtype)


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
    On a GPU several are added by one kernel (:mod:`afd.wire.slot_gpu_torch`), which may round a
    scaled value once with the sum.
    """
    first = views[0]
    if len(views) == 1:
        return first.decode(rows, dtype)
    if first.payload.is_cuda and first.tag != Tag.E2M1 and len(views) <= MOST:
        from afd.wire import slot_gpu_torch as gpu

        out = torch.empty((rows, first.payload.shape[1]), dtype=dtype, device=first.payload.device)
        gpu.sum_of_parts(views, out)
        return out
    total = first.decode(rows, torch.float32)
    for view in views[1:]:
        total += view.decode(rows, torch.float32)
    return total.to(dtype)
