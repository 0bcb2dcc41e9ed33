"""Sorts (row, expert) pairs by expert and pads them, for grouped matrix kernels."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class SortedPairs:
    """Order in which a grouped kernel processes the pairs of a batch; on the batch's device.

    pairs: int32 [capacity], pair numbers (row * K + k). Each expert's run is padded to a multiple
        of the block; the padding has the number of all pairs.
    experts: int32 [capacity / block], local expert of each block.
    used: int32 [1], entries of ``pairs`` in use. Further entries and blocks are undefined.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor


def capacity(pairs: int, experts: int, block: int) -> int:
    """Entries that are enough for any distribution of ``pairs`` over ``experts``."""
    padded = pairs + min(pairs, experts) * (block - 1)
    return -(-padded // block) * block


BINS = 32
"""Experts per program of the sorting kernels."""


def chunking(pairs: int) -> tuple[int, int]:
    """(pairs, warps) of a program of the sorting kernels.

    Few pairs make many programs. But up to 32 chunks should hold the batch, because every program
    adds up the counts of all chunks, 32 at a time.
    """
    chunk = min(max(1 << (-(-pairs // 32) - 1).bit_length(), 64), 512)
    return chunk, chunk // 64 if chunk > 256 else 4


class _Counted(NamedTuple):
    """Result of the first launch and arguments of the second: counts per chunk, number of pairs,
    grid and constants."""

    counts: torch.Tensor
    pairs: int
    grid: tuple[int, int]
    constants: dict[str, int]


def _count(topk_ids: torch.Tensor, start: int, end: int, shared: bool) -> _Counted:
    from ffn_worker.kernels.sorting import count_pairs_kernel

    rows, top_k = topk_ids.shape
    experts, pairs = end - start + shared, rows * (top_k + shared)
    chunk, warps = chunking(pairs)
    grid = -(-pairs // chunk), -(-experts // BINS)
    width = max(1 << (experts - 1).bit_length(), BINS)
    counts = torch.empty((grid[0], width), dtype=torch.int32, device=topk_ids.device)
    constants = {"K": top_k, "CHUNK": chunk, "BINS": BINS, "EXPERTS": width, "num_warps": warps}
    count_pairs_kernel[grid](
        topk_ids, counts, pairs, start, end - start, SHARED=shared, **constants
    )
    return _Counted(counts, pairs, grid, constants)


def sort_pairs_on_gpu(
    topk_ids: torch.Tensor,
    start: int,
    end: int,
    block: int,
    *,
    shared: bool = False,
    load: torch.Tensor | None = None,
) -> SortedPairs:
    """:func:`sort_pairs` in two Triton launches, optionally with the shared expert's pairs.

    Args:
        shared: adds a last pair to every row, for the local expert ``end - start``.
        load: int64 [end - start]; the pairs of each routed expert are added to it.
    """
    from ffn_worker.kernels.sorting import sort_pairs_kernel

    counts, pairs, grid, constants = _count(topk_ids, start, end, shared)
    size = capacity(pairs, end - start + shared, block)
    new = partial(torch.empty, dtype=torch.int32, device=topk_ids.device)
    order, owners, used = new(size), new(size // block), new(1)
    sort_pairs_kernel[grid](
        topk_ids, counts, counts if load is None else load, order, owners, used, pairs, start,
        end - start, SHARED=shared, LOAD=load is not None, BLOCK=block, **constants,
    )  # fmt: skip
    return SortedPairs(order, owners, used)


@dataclass(frozen=True)
class PlacedPairs:
    """The order of SortedPairs as a map from pairs to slots; on the batch's device.

    slots: int32 [rows * K], the slot of each pair; -1 if its expert is not local.
    pairs: int32 [capacity], the pair in each slot; undefined in slots without a pair.
    ends: int32 [experts], end of each expert's run, without padding. A run begins at the first
        multiple of the block that is not below the previous end.
    taken: int32 [2], zeros. Counters of the kernels that take tiles from a queue; one use each.
    """

    slots: torch.Tensor
    pairs: torch.Tensor
    ends: torch.Tensor
    taken: torch.Tensor


def place_pairs_on_gpu(
    topk_ids: torch.Tensor, start: int, end: int, block: int, load: torch.Tensor | None = None
) -> PlacedPairs:
    """:func:`place_pairs` in two Triton launches. load: as in :func:`sort_pairs_on_gpu`."""
    from ffn_worker.kernels.sorting import place_pairs_kernel

    counts, pairs, grid, constants = _count(topk_ids, start, end, False)
    new = partial(torch.empty, dtype=torch.int32, device=topk_ids.device)
    size = capacity(pairs, end - start, block)
    slots, order, ends, taken = new(pairs), new(size), new(end - start), new(2)
    place_pairs_kernel[grid](
        topk_ids, counts, counts if load is None else load, slots, order, ends, taken, pairs, start,
        end - start, LOAD=load is not None, BLOCK=block, **constants,
    )  # fmt: skip
    return PlacedPairs(slots, order, ends, taken)


def place_pairs(topk_ids: torch.Tensor, start: int, end: int, block: int) -> PlacedPairs:
    """The slots of pairs in the order of :func:`sort_pairs`: the reference of the kernels."""
    order = sort_pairs(topk_ids, start, end, block)
    pairs, experts = topk_ids.numel(), end - start
    used = int(order.used)
    owners = order.experts.repeat_interleave(block)[:used]
    slots = torch.full((pairs + 1,), -1, dtype=torch.int32, device=topk_ids.device)
    slots[order.pairs[:used].long()] = torch.arange(used, dtype=torch.int32, device=slots.device)
    padded = torch.bincount(owners, minlength=experts)
    real = torch.bincount(owners[order.pairs[:used] < pairs], minlength=experts)
    ends = (padded.cumsum(0) - padded + real).int()
    return PlacedPairs(slots[:pairs], order.pairs, ends, ends.new_zeros(2))


def sort_pairs(
    topk_ids: torch.Tensor, start: int, end: int, block: int, *, shared: bool = False
) -> SortedPairs:
    """Sorts the pairs whose expert lies in [start, end): the reference of the kernels.

    Args:
        topk_ids: int32 [rows, K], global expert ids; ids outside of the range are skipped.
        shared: as in :func:`sort_pairs_on_gpu`.
    """
    if shared:
        local = torch.where((topk_ids >= start) & (topk_ids < end), topk_ids - start, -1)
        topk_ids, start, end = F.pad(local, (0, 1), value=end - start), 0, end - start + 1
    count, experts = topk_ids.numel(), end - start
    device, size = topk_ids.device, capacity(topk_ids.numel(), end - start, block)
    local = (topk_ids >= start) & (topk_ids < end)
    expert = torch.where(local, topk_ids - start, experts).flatten().long()
    counts = torch.zeros(experts + 1, dtype=torch.long, device=device)
    counts.index_add_(0, expert, torch.ones_like(expert))
    padded = (counts + block - 1) // block * block
    ends = padded[:experts].cumsum(0)
    begins = padded.cumsum(0) - padded
    order = torch.argsort(expert, stable=True)
    by_expert = expert[order]
    rank = torch.arange(count, device=device) - (counts.cumsum(0) - counts)[by_expert]
    # One extra entry takes the pairs of experts that are not local.
    place = torch.where(by_expert < experts, begins[by_expert] + rank, size)
    pairs = torch.full((size + 1,), count, dtype=torch.int32, device=device)
    pairs.scatter_(0, place, order.int())
    firsts = torch.arange(0, size, block, device=device)
    owner = torch.searchsorted(ends, firsts, right=True).clamp(max=experts - 1)
    return SortedPairs(pairs[:size], owner.int(), ends[-1:].int())
