"""Masks the (row, expert) pairs of other FFN instances. Reference: ``masked_pairs`` of
:mod:`ffn_worker.moe.pairs`."""

import triton
import triton.language as tl


@triton.jit
def masked_pairs_kernel(
    ids_ptr, weights_ptr, local_ptr, kept_ptr, pairs, start, experts, other, BLOCK: tl.constexpr
):  # fmt: skip
    """Pairs of local experts: local = id - start, kept = weight. Others: ``other`` and 0.

    ids, local int32; weights, kept float32; all [pairs]. Grid (pairs / BLOCK, rounded up).
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    local = tl.load(ids_ptr + pair, mask=inside, other=-1) - start
    mine = inside & (local >= 0) & (local < experts)
    tl.store(local_ptr + pair, tl.where(mine, local, other), mask=inside)
    tl.store(kept_ptr + pair, tl.load(weights_ptr + pair, mask=mine, other=0.0), mask=inside)
