"""Pairs (row, expert) sorted by expert and padded, for grouped matrix kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SortedPairs:
    """Order in which a grouped kernel walks the pairs of a batch; all on the batch's device.

    pairs: int32 [capacity], pair numbers (row * K + k), each expert's run padded with the number
    of all pairs to a multiple of the block. experts: int32 [capacity / block], local expert of
    each block. used: int32 [1], how much of ``pairs`` is in use.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor


def capacity(pairs: int, experts: int, block: int) -> int:
    """Entries that any distribution of ``pairs`` over ``experts`` fits into."""
    padded = pairs + min(pairs, experts) * (block - 1)
    return -(-padded // block) * block


def sort_pairs(topk_ids: torch.Tensor, start: int, end: int, block: int) -> SortedPairs:
    """Sorts the pairs whose expert lies in [start, end). Sizes depend on shapes only and nothing
    is copied to the host, so that it can be captured in a graph.

    Args:
        topk_ids: int32 [rows, K], global expert ids; ids outside of the range are left out.
    """
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
    # One entry too many takes the pairs of other instances' experts.
    place = torch.where(by_expert < experts, begins[by_expert] + rank, size)
    pairs = torch.full((size + 1,), count, dtype=torch.int32, device=device)
    pairs.scatter_(0, place, order.int())
    firsts = torch.arange(0, size, block, device=device)
    owner = torch.searchsorted(ends, firsts, right=True).clamp(max=experts - 1)
    return SortedPairs(pairs[:size], owner.int(), ends[-1:].int())
