"""Sorting (row, expert) pairs by expert, in two launches. See :mod:`ffn_worker.moe.sorting`, whose
``sort_pairs`` and ``place_pairs`` are the references: same pairs in the same order."""

import triton
import triton.language as tl


@triton.jit
def _expert_of(ids_ptr, pair, pairs, start, experts, K: tl.constexpr, SHARED: tl.constexpr):
    """Local expert of each pair; ``experts`` for a shared expert's pair, -1 for nobody's."""
    each: tl.constexpr = K + 1 if SHARED else K
    k = pair % each
    inside = pair < pairs
    routed = tl.load(ids_ptr + pair // each * K + k, mask=inside & (k < K), other=-1) - start
    expert = tl.where((routed >= 0) & (routed < experts) & (k < K), routed, -1)
    if SHARED:
        expert = tl.where(k == K, experts, expert)
    return tl.where(inside, expert, -1)


@triton.jit
def count_pairs_kernel(
    ids_ptr, counts_ptr, load_ptr, pairs, start, experts,
    K: tl.constexpr, SHARED: tl.constexpr, CHUNK: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """counts[e] = pairs of local expert e. ids int32 [rows, K] global; counts int32. With LOAD they
    are added to load int64 [experts] as well.

    pairs: rows * K, with SHARED rows * (K + 1): each row's last pair is the shared expert's, which
    is local expert ``experts``. Grid (experts), with SHARED (experts + 1).
    """
    mine = tl.program_id(0)
    total = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        expert = _expert_of(ids_ptr, pair, pairs, start, experts, K, SHARED)
        total += (expert == mine).to(tl.int32)
    count = tl.sum(total, axis=0)
    tl.store(counts_ptr + mine, count)
    if LOAD:
        routed = mine < experts
        tl.store(load_ptr + mine, tl.load(load_ptr + mine, mask=routed) + count, mask=routed)


@triton.jit
def sort_pairs_kernel(
    ids_ptr, counts_ptr, sorted_ptr, owners_ptr, used_ptr, pairs, start, experts,
    K: tl.constexpr, SHARED: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each expert's run of pair numbers, padded with ``pairs`` to a multiple of BLOCK.

    counts: of count_pairs_kernel. sorted int32; owners int32, the expert of each block; used int32
    [1], the entries of sorted that are in use (those beyond are not written). EXPERTS: a power of
    two above the number of programs. Grid as count_pairs_kernel.
    """
    mine = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + each, mask=each < tl.num_programs(0), other=0)
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    begin = tl.sum(tl.where(each < mine, padded, 0), axis=0)
    count = tl.sum(tl.where(each == mine, counts, 0), axis=0)
    end = begin + (count + BLOCK - 1) // BLOCK * BLOCK
    if mine == 0:
        tl.store(used_ptr, tl.sum(padded, axis=0))
    at = begin
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        chosen = _expert_of(ids_ptr, pair, pairs, start, experts, K, SHARED) == mine
        rank = tl.cumsum(chosen.to(tl.int32), axis=0)
        tl.store(sorted_ptr + at + rank - 1, pair, mask=chosen)
        at += tl.sum(chosen.to(tl.int32), axis=0)
    rest = begin + count + tl.arange(0, BLOCK)
    tl.store(sorted_ptr + rest, tl.zeros((BLOCK,), tl.int32) + pairs, mask=rest < end)
    for block in range(begin // BLOCK, end // BLOCK):
        tl.store(owners_ptr + block, mine)


@triton.jit
def place_pairs_kernel(
    ids_ptr, counts_ptr, slots_ptr, ends_ptr, pairs, start, experts,
    K: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The place of each pair in the order that sort_pairs_kernel writes down, without a shared
    expert.

    counts: of count_pairs_kernel. slots int32 [pairs], -1 for a pair of nobody's; ends int32, one
    per program: where its run ends, without its padding. EXPERTS and grid as sort_pairs_kernel.
    """
    mine = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + each, mask=each < tl.num_programs(0), other=0)
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    at = tl.sum(tl.where(each < mine, padded, 0), axis=0)
    tl.store(ends_ptr + mine, at + tl.sum(tl.where(each == mine, counts, 0), axis=0))
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        expert = _expert_of(ids_ptr, pair, pairs, start, experts, K, False)
        chosen = expert == mine
        rank = tl.cumsum(chosen.to(tl.int32), axis=0)
        tl.store(slots_ptr + pair, at + rank - 1, mask=chosen)
        at += tl.sum(chosen.to(tl.int32), axis=0)
        if mine == 0:
            nobodys = (expert < 0) & (pair < pairs)
            tl.store(slots_ptr + pair, tl.full((CHUNK,), -1, tl.int32), mask=nobodys)
