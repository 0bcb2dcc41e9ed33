"""Take rows out of slots, and add up answers."""

from collections.abc import Collection, Sequence

import torch

from afd.schedule import row_shares
from afd.wire.layout import Tag
from afd.wire.slot_view_torch import MOST, RoutedRows, SlotView


def take_rows(
    views: Sequence[SlotView], counts: Sequence[int], into: RoutedRows, masked: Collection[int] = ()
) -> None:
    """Copy the first ``counts[i]`` rows of each message i into consecutive rows.

    One kernel on a GPU (:mod:`afd.wire.slot_gpu_torch`).

    Args:
        views: slots of one region.
        into: contiguous, at least as many rows; the remaining rows are not changed.
        masked: indices of messages that were not sent. Their ids become -1, so that none of their
            experts is computed.
    """
    if views[0].payload.is_cuda:
        from afd.wire import slot_gpu_torch as gpu

        gpu.take_rows(views, counts, into, masked)
        return
    begin = 0
    for i, (view, rows) in enumerate(zip(views, counts, strict=True)):
        here = into.cut(begin, begin + rows)
        here.copy_(RoutedRows.of(view, rows))
        if i in masked:
            here.ids.fill_(-1)
        begin += rows


def take_bucket(
    views: Sequence[SlotView], rows: torch.Tensor, bucket: int, tp: int, into: RoutedRows
) -> None:
    """Copy ``rows[i]`` rows of each message i into ``bucket`` rows, consecutive by message.

    The sizes depend on no message, so that a graph can hold it. The rows of a message are placed
    such that each rank's share of the bucket (:func:`afd.schedule.row_shares`) begins with that
    rank's share of the message. All other rows are zero with ids -1: no expert computes them.

    One kernel on a GPU (:mod:`afd.wire.slot_gpu_torch`).

    Args:
        views: slots of one region, all the same distance apart.
        rows: int32 [messages], at most ``bucket`` each, on the device of the slots. 0: masked.
        tp: ranks of the FFN instance.
        into: contiguous, messages * bucket rows.
    """
    if views[0].payload.is_cuda:
        from afd.wire import slot_gpu_torch as gpu

        gpu.take_bucket(views, rows, bucket, tp, into)
        return
    payload = into.x.payload
    (payload.view(torch.uint8) if payload.dtype.itemsize == 1 else payload).zero_()
    if into.x.scales is not None:
        into.x.scales.zero_()
    into.weights.zero_()
    into.ids.fill_(-1)
    shares = row_shares(bucket, tp)
    for i, (view, count) in enumerate(zip(views, rows.tolist(), strict=True)):
        for (begin, end), (place, _) in zip(row_shares(count, tp), shares, strict=True):
            first = i * bucket + place
            sent = RoutedRows.of(view, count).cut(begin, end)
            into.cut(first, first + end - begin).copy_(sent)


def sum_of_shares(
    views: Sequence[SlotView],
    tp: int,
    shares: Sequence[torch.Tensor],
    rows: int,
    hidden: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Like :func:`sum_of_ranks`, bit for bit, if FFN instance j answered the rows shares[j] only.

    Args:
        shares: per instance int64 [its rows], each row at most once. A row without answers is 0.
    """
    device = views[0].payload.device
    total = torch.zeros((rows, hidden), dtype=torch.float32, device=device)
    for j, share in enumerate(shares):
        for rank, (start, end) in enumerate(row_shares(len(share), tp)):
            answer = views[j * tp + rank].decode(end - start, torch.float32)
            total.index_add_(0, share[start:end], answer)
    return total.to(dtype)


def sum_of_ranks(views: Sequence[SlotView], tp: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Sum of the answers of all FFN ranks to ``rows`` rows: [rows, hidden].

    Args:
        views: by rank number. The ``tp`` ranks of one instance each answer a share of the rows
            (:func:`afd.schedule.row_shares`); the answers of different instances are added
            (:func:`sum_of_parts`).
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
    """Sum of the FFN instances' answers to one micro-batch, added in float32: [rows, hidden].

    A single answer that needs no decoding is returned as slot memory, valid until the slot is
    written again. On a GPU one kernel adds several (:mod:`afd.wire.slot_gpu_torch`); it may round a
    scaled value only once, together with the sum.
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


class PlacedAnswers:
    """The slots that all FFN ranks answer one micro-batch into. Adds up answers to a part of the
    rows each, with shapes that do not depend on the data."""

    def __init__(self, views: Sequence[SlotView], tp: int) -> None:
        """views: by rank number; ``tp`` ranks per FFN instance. Waits for the device."""
        self._views = views
        self._tp = tp
        self._far: torch.Tensor | None = None
        if views[0].payload.is_cuda and views[0].tag != Tag.E2M1:
            from afd.wire import slot_gpu_torch as gpu

            self._far = gpu.table_of_distances([view.payload for view in views])

    def sum(self, of_rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns :func:`sum_of_shares` of these rows, bit for bit: [rows, hidden].

        One kernel on a GPU (:mod:`afd.wire.slot_gpu_torch`), except for E2M1.

        Args:
            of_rows: int32 [instances, rows]. FFN instance j's answer has row r at of_rows[j, r];
                -1: it has no answer for the row. The ranks of an instance answer shares of all
                rows, as if it had received every row.
        """
        rows = of_rows.shape[1]
        if self._far is not None:
            from afd.wire import slot_gpu_torch as gpu

            return gpu.sum_of_places(self._views[0], self._far, self._tp, of_rows, dtype)
        total = torch.zeros((rows, self._views[0].hidden), device=of_rows.device)
        for j, place in enumerate(of_rows):
            parts = [
                self._views[j * self._tp + rank].decode(end - start, torch.float32)
                for rank, (start, end) in enumerate(row_shares(rows, self._tp))
            ]
            answer = torch.cat(parts)[place.clamp(min=0).long()]
            total += torch.where(place.unsqueeze(1) >= 0, answer, 0.0)
        return total.to(dtype)
