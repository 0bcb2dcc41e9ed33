"""Slots of a region in a GPU's memory: the kernels of :mod:`afd.wire.slot_triton` on torch tensors.

Results equal those of the reference, :mod:`afd.wire.slot_torch`. A launch of :func:`take_rows` and
:func:`sum_of_parts` handles up to 8 messages, one of :func:`take_bucket` any number; nothing is
copied to the host.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
import triton

from afd.wire import slot_triton as kernels
from afd.wire.slot_view_torch import MOST, RoutedRows, SlotView


def distances(parts: Sequence[torch.Tensor]) -> list[int]:
    """Distances of the other tensors from the first, in units of 16 bytes, padded with zeros to
    the number of kernel arguments. The tensors are parts of slots of one region, or just one."""
    first, *others = (part.data_ptr() for part in parts)
    assert len(others) < MOST and not any((other - first) % 16 for other in others)
    found = [(other - first) // 16 for other in others]
    return found + [0] * (MOST - 1 - len(found))


def take_rows(
    views: Sequence[SlotView], counts: Sequence[int], into: RoutedRows, masked: Collection[int] = ()
) -> None:
    """See :func:`afd.wire.slot_torch.take_rows`."""
    begin = 0
    for at in range(0, len(views), MOST):
        group = slice(at, at + MOST)
        rows = sum(counts[group])
        bits = sum(1 << (i - at) for i in masked if at <= i < at + MOST)
        if rows:
            _take(views[group], counts[group], into.cut(begin, begin + rows), bits)
        begin += rows


def _take(views: Sequence[SlotView], counts: Sequence[int], to: RoutedRows, masked: int) -> None:
    first, top_k = views[0], to.ids.shape[1]
    assert first.ids is not None and first.weights is not None
    begins = [sum(counts[:i]) for i in range(1, len(counts))]
    begins += [0] * (MOST - 1 - len(begins))
    payload, to_payload = _bytes(first.payload), _bytes(to.x.payload)
    scales, to_scales, scale_bytes = payload, to_payload, 0
    if first.scales is not None and to.x.scales is not None:
        scales, to_scales = _bytes(first.scales), _bytes(to.x.scales)
        scale_bytes = scales.shape[1]
    kernels.take_rows_kernel[(sum(counts),)](
        payload,
        scales,
        first.ids,
        first.weights,
        to_payload,
        to_scales,
        to.ids,
        to.weights,
        *distances([view.payload for view in views]),
        *begins,
        masked,
        payload.shape[1],
        scale_bytes,
        MESSAGES=len(views),
        TOP_K=top_k,
        KINDS=triton.next_power_of_2(top_k),
        BLOCK=triton.next_power_of_2(payload.shape[1]),
        SCALE_BLOCK=triton.next_power_of_2(scale_bytes) if scale_bytes else 0,
    )


def take_bucket(
    views: Sequence[SlotView], rows: torch.Tensor, bucket: int, tp: int, into: RoutedRows
) -> None:
    """See :func:`afd.wire.slot_torch.take_bucket`."""
    first, top_k = views[0], into.ids.shape[1]
    assert first.ids is not None and first.weights is not None
    payload, to_payload = _bytes(first.payload), _bytes(into.x.payload)
    scales, to_scales, scale_bytes = payload, to_payload, 0
    if first.scales is not None and into.x.scales is not None:
        scales, to_scales = _bytes(first.scales), _bytes(into.x.scales)
        scale_bytes = scales.shape[1]
    addresses = [view.payload.data_ptr() for view in views]
    apart = addresses[1] - addresses[0] if len(views) > 1 else 0
    assert apart % 16 == 0 and all(b - a == apart for a, b in pairwise(addresses))
    kernels.take_bucket_kernel[(len(views) * bucket,)](
        payload,
        scales,
        first.ids,
        first.weights,
        to_payload,
        to_scales,
        into.ids,
        into.weights,
        rows,
        apart // 16,
        bucket,
        tp,
        payload.shape[1],
        scale_bytes,
        TOP_K=top_k,
        KINDS=triton.next_power_of_2(top_k),
        BLOCK=triton.next_power_of_2(payload.shape[1]),
        SCALE_BLOCK=triton.next_power_of_2(scale_bytes) if scale_bytes else 0,
    )


def sum_of_parts(views: Sequence[SlotView], out: torch.Tensor) -> None:
    """Add the first rows of up to 8 answers into out [rows, hidden]. Not for E2M1."""
    rows, hidden = out.shape
    first, block = views[0], 1024
    if rows:
        kernels.sum_messages_kernel[(rows, triton.cdiv(hidden, block))](
            first.payload,
            first.payload if first.scales is None else first.scales,
            out,
            *distances([view.payload for view in views]),
            hidden,
            MESSAGES=len(views),
            SCALED=first.scales is not None,
            BLOCK=block,
        )


def table_of_distances(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """:func:`distances` of any number of tensors, int64 [tensors] on their device. Waits for it."""
    first = parts[0].data_ptr()
    assert not any((part.data_ptr() - first) % 16 for part in parts)
    far = [(part.data_ptr() - first) // 16 for part in parts]
    return torch.tensor(far, dtype=torch.int64, device=parts[0].device)


def sum_of_places(
    first: SlotView, far: torch.Tensor, tp: int, of_rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See :class:`afd.wire.slot_torch.PlacedAnswers`. Not for E2M1.

    Args:
        first: answer of the first rank. far: :func:`table_of_distances` of all answers.
    """
    (instances, rows), block = of_rows.shape, 1024
    out = torch.empty((rows, first.hidden), dtype=dtype, device=of_rows.device)
    if rows:
        kernels.sum_places_kernel[(rows, triton.cdiv(first.hidden, block))](
            first.payload,
            first.payload if first.scales is None else first.scales,
            of_rows,
            far,
            out,
            first.hidden,
            instances,
            tp,
            SCALED=first.scales is not None,
            BLOCK=block,
        )
    return out


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
