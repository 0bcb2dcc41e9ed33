"""(row, expert) pairs of a batch, reduced to the experts of one FFN instance."""

from typing import NamedTuple

import torch


class LocalPairs(NamedTuple):
    """Pairs with a local expert: their row, their local expert id and their weight, each [P]."""

    rows: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def local_pairs(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, start: int, end: int
) -> LocalPairs:
    """Pairs whose expert lies in [start, end), in row order.

    Args:
        topk_ids: [rows, K] int32 global ids; negative ids are masked pairs.
        topk_weights: [rows, K] float32.

    Returns:
        rows int64 [P], experts int64 [P] counted from `start`, weights float32 [P].
    """
    rows, columns = torch.nonzero((topk_ids >= start) & (topk_ids < end), as_tuple=True)
    return LocalPairs(rows, topk_ids[rows, columns].long() - start, topk_weights[rows, columns])


def sum_pairs(pairs: LocalPairs, outputs: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Adds `outputs` [P, H] of the pairs, times their weights, into a tensor like `like` [rows, H].

    Accumulates in float32 and rounds once, to the dtype of `like`.
    """
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    total.index_add_(0, pairs.rows, outputs.float() * pairs.weights.unsqueeze(1))
    return total.to(like.dtype)
