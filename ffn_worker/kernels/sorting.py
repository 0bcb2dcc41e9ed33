"""Sorts (row, expert) pairs by expert, in two launches.

References, with the same order of pairs: ``sort_pairs`` and ``place_pairs`` of
:mod:`ffn_worker.moe.sorting`.

Both launches split the batch into chunks of CHUNK pairs and the experts into groups of BINS. Grid:
(ceil(pairs / CHUNK), ceil(experts / BINS)); a shared expert counts as one expert more. The first
launch writes counts int32 [chunks, EXPERTS]. EXPERTS is a power of two; columns beyond the experts
are undefined.
"""

import triton
import triton.language as tl


@triton.jit
def _expert_of(ids_ptr, pair, pairs, start, experts, K: tl.constexpr, SHARED: tl.constexpr):
    """Local expert of each pair; ``experts`` for the shared expert, -1 if it is not local."""
    each: tl.constexpr = K + 1 if SHARED else K
    k = pair % each
    inside = pair < pairs
    routed = tl.load(ids_ptr + pair // each * K + k, mask=inside & (k < K), other=-1) - start
    expert = tl.where((routed >= 0) & (routed < experts) & (k < K), routed, -1)
    if SHARED:
        expert = tl.where(k == K, experts, expert)
    return tl.where(inside, expert, -1)


@triton.jit
def _round_up(counts, BLOCK: tl.constexpr):
    return (counts + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def count_pairs_kernel(
    ids_ptr, counts_ptr, pairs, start, experts,
    K: tl.constexpr, SHARED: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """counts[chunk, e] = pairs of local expert e in a chunk. ids: int32 [rows, K], global ids.

    pairs: rows * K, with SHARED rows * (K + 1): the last pair of each row belongs to the shared
    expert, local expert ``experts``.
    """
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = _expert_of(ids_ptr, pair, pairs, start, experts, K, SHARED)
    mine = tl.program_id(1) * BINS + tl.arange(0, BINS)
    found = expert[:, None] == mine[None, :]
    counts = tl.sum(found.to(tl.int32), axis=0)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + mine, counts)


@triton.jit
def _runs(
    counts_ptr, mine, all_experts, BLOCK: tl.constexpr, BINS: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """Returns (begins, counts, earlier, total).

    begins, counts, earlier: of each expert of ``mine``, the begin of its run, its pairs, and those
    of its pairs that lie in earlier chunks. total: entries of all runs, padding included.
    """
    each = tl.arange(0, EXPERTS)
    step = tl.arange(0, 32)
    every = tl.zeros((32, EXPERTS), tl.int32)
    counts = tl.zeros((32, BINS), tl.int32)
    earlier = tl.zeros((32, BINS), tl.int32)
    for first in range(0, tl.num_programs(0), 32):
        chunk = first + step
        there = (chunk < tl.num_programs(0))[:, None]
        at = counts_ptr + chunk[:, None] * EXPERTS
        every += tl.load(at + each[None, :], mask=there & (each < all_experts)[None, :], other=0)
        found = tl.load(at + mine[None, :], mask=there & (mine < all_experts)[None, :], other=0)
        counts += found
        earlier += tl.where((chunk < tl.program_id(0))[:, None], found, 0)
    every = tl.sum(every, axis=0)
    counts = tl.sum(counts, axis=0)
    earlier = tl.sum(earlier, axis=0)
    padded = _round_up(every, BLOCK)
    first = tl.sum(tl.where(each < tl.min(mine, axis=0), padded, 0), axis=0)
    own = _round_up(counts, BLOCK)
    return first + tl.cumsum(own, axis=0) - own, counts, earlier, tl.sum(padded, axis=0)


@triton.jit
def _entries(expert, mine, begins):
    """Entry of each pair of this chunk in the sorted order; undefined for experts not in ``mine``.

    begins: where the pairs of this chunk begin in each expert's run.
    """
    found = expert[:, None] == mine[None, :]
    rank = tl.cumsum(found.to(tl.int32), axis=0) - 1
    return tl.sum(tl.where(found, begins[None, :] + rank, 0), axis=1)


@triton.jit
def _add_load(load_ptr, mine, counts, experts):
    """Adds counts of routed experts to load, int64 [experts]. Atomic: another micro-batch of the
    layer may add at the same time."""
    tl.atomic_add(load_ptr + mine, counts.to(tl.int64), mask=mine < experts, sem="relaxed")


@triton.jit
def sort_pairs_kernel(
    ids_ptr, counts_ptr, load_ptr, sorted_ptr, owners_ptr, used_ptr, pairs, start, experts,
    K: tl.constexpr, SHARED: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
    EXPERTS: tl.constexpr, LOAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes each expert's run of pair numbers, padded with ``pairs`` to a multiple of BLOCK.

    counts: from count_pairs_kernel with the same constants. With LOAD they are added to load, int64
    [experts]. sorted: int32. owners: int32, the expert of each block. used: int32 [1], number of
    entries of sorted in use; entries beyond are not written.
    """
    mine = tl.program_id(1) * BINS + tl.arange(0, BINS)
    all_experts = experts + 1 if SHARED else experts
    begins, counts, earlier, used = _runs(counts_ptr, mine, all_experts, BLOCK, BINS, EXPERTS)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = _expert_of(ids_ptr, pair, pairs, start, experts, K, SHARED)
    entry = _entries(expert, mine, begins + earlier)
    tl.store(sorted_ptr + entry, pair, mask=(expert >= 0) & (expert // BINS == tl.program_id(1)))
    blocks = (counts + BLOCK - 1) // BLOCK
    # All chunks share this work, because one expert may have nearly all blocks.
    for block in range(tl.program_id(0), tl.max(blocks, axis=0), tl.num_programs(0)):
        tl.store(owners_ptr + begins // BLOCK + block, mine, mask=block < blocks)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        rest = (begins + counts)[:, None] + tl.arange(0, BLOCK)[None, :]
        nobody = tl.zeros((BINS, BLOCK), tl.int32) + pairs
        tl.store(sorted_ptr + rest, nobody, mask=rest < (begins + blocks * BLOCK)[:, None])
    if tl.program_id(0) == 0:
        if LOAD:
            _add_load(load_ptr, mine, counts, experts)
        if tl.program_id(1) == 0:
            tl.store(used_ptr, used)


@triton.jit
def place_pairs_kernel(
    ids_ptr, counts_ptr, load_ptr, slots_ptr, order_ptr, ends_ptr, taken_ptr, pairs, start, experts,
    K: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, EXPERTS: tl.constexpr,
    LOAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the slot of each pair: its entry in the order of sort_pairs_kernel. No shared expert.

    counts, load: as in sort_pairs_kernel. slots: int32 [pairs], -1 if the expert is not local.
    order: int32, the pair in each slot that has one. ends: int32 [experts], where each run ends,
    without padding. taken: int32 [2], set to zero.
    """
    mine = tl.program_id(1) * BINS + tl.arange(0, BINS)
    begins, counts, earlier, _ = _runs(counts_ptr, mine, experts, BLOCK, BINS, EXPERTS)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = _expert_of(ids_ptr, pair, pairs, start, experts, K, False)
    entry = tl.where(expert < 0, -1, _entries(expert, mine, begins + earlier))
    owner = (
        tl.maximum(expert, 0) // BINS
    )  # pairs of other instances are written with the first group
    mine_here = (pair < pairs) & (owner == tl.program_id(1))
    tl.store(slots_ptr + pair, entry, mask=mine_here)
    tl.store(order_ptr + entry, pair, mask=mine_here & (expert >= 0))
    if tl.program_id(0) == 0:
        tl.store(ends_ptr + mine, begins + counts, mask=mine < experts)
        if tl.program_id(1) == 0:
            tl.store(taken_ptr + tl.arange(0, 2), tl.zeros((2,), tl.int32))
        if LOAD:
            _add_load(load_ptr, mine, counts, experts)
