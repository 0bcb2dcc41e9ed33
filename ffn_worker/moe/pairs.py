"""The (row, expert) pairs of a batch that belong to one FFN instance."""

from typing import NamedTuple

import torch


class LocalPairs(NamedTuple):
    """Pairs with a local expert: rows, local expert ids and weights, each [P]."""

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


def masked_pairs(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, start: int, end: int, other: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local ids and weights of all pairs; the reference of :func:`masked_pairs_on_gpu`.

    Pairs whose expert is outside of [start, end) get the id ``other`` and the weight 0.

    Args:
        topk_ids: [rows, K] int32 global ids; negative ids are masked pairs.
        topk_weights: [rows, K] float32.
    """
    is_local = (topk_ids >= start) & (topk_ids < end)
    ids = torch.where(is_local, topk_ids - start, other).to(torch.int32)
    return ids, torch.where(is_local, topk_weights, 0.0)


def masked_pairs_on_gpu(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, start: int, end: int, other: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`masked_pairs` in one Triton launch; both tensors contiguous."""
    from ffn_worker.kernels.pairs import masked_pairs_kernel

    ids, weights = torch.empty_like(topk_ids), torch.empty_like(topk_weights)
    count, block = ids.numel(), 1024
    masked_pairs_kernel[(-(-count // block),)](
        topk_ids, topk_weights, ids, weights, count, start, end - start, other, BLOCK=block
    )
    return ids, weights


def sum_pairs(pairs: LocalPairs, outputs: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of `outputs` [P, H] per row, a tensor like `like` [rows, H].

    Accumulates in float32 and rounds once, to the dtype of `like`.
    """
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    total.index_add_(0, pairs.rows, outputs.float() * pairs.weights.unsqueeze(1))
    return total.to(like.dtype)
