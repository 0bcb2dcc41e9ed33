"""The (row, expert) pairs of a batch as one FFN instance sees them. The reference is
``masked_pairs`` of :mod:`ffn_worker.moe.pairs`."""

import triton
import triton.language as tl


@triton.jit
def masked_pairs_kernel(
    ids_ptr, weights_ptr, local_ptr, kept_ptr, pairs, start, experts, other, BLOCK: tl.constexpr
):  # fmt: skip
    """local = id - start and kept = weight of local experts' pairs, else ``other`` and 0.

    ids, local int32; weights, kept float32; all [pairs]. Grid (pairs / BLOCK, rounded up).
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    local = tl.load(ids_ptr + pair, mask=inside, other=-1) - start
    mine = inside & (local >= 0) & (local < experts)
    tl.store(local_ptr + pair, tl.where(mine, local, other), mask=inside)
    tl.store(kept_ptr + pair, tl.load(weights_ptr + pair, mask=mine, other=0.0), mask=inside)
