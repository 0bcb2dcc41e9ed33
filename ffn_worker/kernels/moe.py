"""Grouped matrix products of the routed experts as Triton kernels, for CUDA and ROCm.

An MoE layer takes two launches: gate and up, joined by SiLU, then down. Pairs (row, expert) are
sorted by expert and padded so that each block of BM pairs belongs to one expert
(:mod:`ffn_worker.moe.sorting`). Activations stay in the wire's format. A shared expert is computed
as one more routed expert, the last one, which every row selects.
"""

import triton
import triton.language as tl

from afd.wire.codecs_triton import fp8_block, mxfp4_block


@triton.jit
def _a_tile(a_ptr, a_scale_ptr, row, inside, k0, K, A: tl.constexpr, BK: tl.constexpr):
    """Activations [BM, BK] (MXFP4: packed [BM, BK/2]) and their scales."""
    if A == "mxfp4":
        byte = k0 // 2 + tl.arange(0, BK // 2)
        a = tl.load(a_ptr + row[:, None] * (K // 2) + byte[None, :], mask=inside[:, None], other=0)
        group = k0 // 32 + tl.arange(0, BK // 32)
        scale = tl.load(
            a_scale_ptr + row[:, None] * (K // 32) + group[None, :],
            mask=inside[:, None],
            other=127,
        )
    else:
        k = k0 + tl.arange(0, BK)
        a = tl.load(a_ptr + row[:, None] * K + k[None, :], mask=inside[:, None], other=0.0)
        if A == "fp8":
            scale = tl.load(a_scale_ptr + row * (K // 128) + k0 // 128, mask=inside, other=0.0)
        else:
            scale = inside  # unused
    return a, scale


@triton.jit
def _product(
    acc, a, a_scale, b_ptr, b_scale_ptr, expert, n, n0, n_rows, k0, K,
    A: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """acc + activations x weights, for one step of K.

    n: weight rows of this tile. n0: the first of them. SWAP (FP8 only): computes the transposed
    product, weights first.
    """
    if B == "mxfp4":
        byte = k0 // 2 + tl.arange(0, BK // 2)
        at = expert * n_rows * (K // 2) + n[None, :] * (K // 2) + byte[:, None]
        b = tl.load(b_ptr + at)
        group = k0 // 32 + tl.arange(0, BK // 32)
        at = expert * n_rows * (K // 32) + n[:, None] * (K // 32) + group[None, :]
        b_scale = tl.load(b_scale_ptr + at)
        if A == "mxfp4":
            acc = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", acc)
        else:
            acc = tl.dot_scaled(a, None, "bf16", b, b_scale, "e2m1", acc)
    else:
        k = k0 + tl.arange(0, BK)
        b = tl.load(b_ptr + expert * n_rows * K + n[None, :] * K + k[:, None])
        if B == "fp8":
            b_scale_ptr += expert * (n_rows // 128) * (K // 128) + k0 // 128
            if SWAP:
                b_scale = tl.load(b_scale_ptr + n0 // 128 * (K // 128))
                acc += tl.dot(tl.trans(b), tl.trans(a)) * (a_scale * b_scale)[None, :]
            elif BN <= 128:  # one scale for all columns
                b_scale = tl.load(b_scale_ptr + n0 // 128 * (K // 128))
                acc += tl.dot(a, b) * (a_scale * b_scale)[:, None]
            else:
                b_scale = tl.load(b_scale_ptr + n // 128 * (K // 128))
                acc += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        else:
            acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _store(
    c_ptr, c_scale_ptr, value, pair, inside, n, N, C: tl.constexpr,
    FP8_MAX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Stores rows ``pair`` of the result in the format ``C``."""
    n0 = tl.min(n, axis=0)
    if C == "fp8":
        code, scale = fp8_block(tl.reshape(value, (BM, BN // 128, 128)), FP8_MAX, EXACT=False)
        code = tl.reshape(code, (BM, BN)).to(c_ptr.dtype.element_ty)
        tl.store(c_ptr + pair[:, None] * N + n[None, :], code, mask=inside[:, None])
        group = n0 // 128 + tl.arange(0, BN // 128)
        at = pair[:, None] * (N // 128) + group[None, :]
        tl.store(c_scale_ptr + at, scale, mask=inside[:, None])
    elif C == "mxfp4":
        code, scale = mxfp4_block(tl.reshape(value, (BM * BN // 32, 32)))
        code = tl.reshape(code, (BM, BN // 2))
        byte = n0 // 2 + tl.arange(0, BN // 2)
        tl.store(c_ptr + pair[:, None] * (N // 2) + byte[None, :], code, mask=inside[:, None])
        group = n0 // 32 + tl.arange(0, BN // 32)
        at = pair[:, None] * (N // 32) + group[None, :]
        tl.store(c_scale_ptr + at, tl.reshape(scale, (BM, BN // 32)), mask=inside[:, None])
    else:
        mask = inside[:, None] & (n < N)[None, :]
        tl.store(c_ptr + pair[:, None] * N + n[None, :], value.to(c_ptr.dtype.element_ty), mask)


@triton.jit
def grouped_gemm_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    c_ptr,
    c_scale_ptr,
    pairs_ptr,
    experts_ptr,
    used_ptr,
    N,
    K,
    pairs,
    rows_per,
    shared_expert,
    shared_width,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    GATED: tl.constexpr,
    SHARED: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
):
    """C[pair] = A[pair // rows_per] x B[expert of pair].T; with GATED, silu(gate) * up of that.

    A [rows, K] in format A; B [E, N, K] (GATED: [E, 2N, K], gate rows first) in format B; C
    [pairs, N] in format C. Formats: "plain" (one dtype), "fp8" (float32 scales: A and C per 128
    columns, B per 128 x 128), "mxfp4" (packed, E8M0 per 32). With "mxfp4" B, A is "mxfp4" or
    "plain" bfloat16.

    pairs_ptr: int32, pair numbers sorted by expert; padding is >= ``pairs``.
    experts_ptr: int32, the local expert of each block of BM pairs.
    used_ptr: int32 [1], number of entries of pairs_ptr in use.
    K must be a multiple of BK and, for a quantised C, N of BN.
    Grid: (blocks of pairs * blocks of N).

    SWAP: weights are the first operand and activations the second; FP8 with BN of at most 128.
    Hopper's FP8 instructions need at least 64 rows of the first operand, but only 8 of the second.

    SHARED: expert ``shared_expert`` has width ``shared_width``, a multiple of the columns per scale
    and of the second launch's BK. The first launch (GATED) does not compute further columns of C;
    the second does not read further columns of A.
    """
    blocks_n = tl.cdiv(N, BN)
    blocks_m = tl.num_programs(0) // blocks_n
    # Neighbouring programs share weights: GROUP_M blocks of pairs per column of tiles.
    width = GROUP_M * blocks_n
    first = tl.program_id(0) // width * GROUP_M
    height = min(blocks_m - first, GROUP_M)
    block_m = first + tl.program_id(0) % width % height
    block_n = tl.program_id(0) % width // height
    if block_m * BM >= tl.load(used_ptr):
        return
    pair = tl.load(pairs_ptr + block_m * BM + tl.arange(0, BM))
    inside = pair < pairs
    pair = tl.where(inside, pair, 0).to(tl.int64)
    row = pair // rows_per
    expert = tl.load(experts_ptr + block_m).to(tl.int64)
    k_end = K
    if SHARED:
        if GATED:
            if expert == shared_expert and block_n * BN >= shared_width:
                return
        else:
            k_end = tl.where(expert == shared_expert, shared_width, K)
    n0 = block_n * BN
    n = n0 + tl.arange(0, BN)
    n_read = n % N  # columns beyond N wrap around and are not stored
    n_rows = 2 * N if GATED else N
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    up = tl.zeros_like(acc)
    for k0 in range(0, k_end, BK):
        a, a_scale = _a_tile(a_ptr, a_scale_ptr, row, inside, k0, K, A, BK)
        acc = _product(
            acc, a, a_scale, b_ptr, b_scale_ptr, expert, n_read, n0, n_rows, k0, K, A, B, BN, BK,
            SWAP,
        )  # fmt: skip
        if GATED:
            up = _product(
                up, a, a_scale, b_ptr, b_scale_ptr, expert, n_read + N, n0 + N, n_rows, k0, K,
                A, B, BN, BK, SWAP,
            )  # fmt: skip
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if SWAP:
        acc = tl.trans(acc)
    _store(c_ptr, c_scale_ptr, acc, pair, inside, n, N, C, FP8_MAX, BM, BN)


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    hidden,
    first_expert,
    last_expert,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = sum over k of weights[row, k] * y[row * EACH + k], local experts only.

    With SHARED, adds the shared expert's y[row * EACH + TOP_K]. EACH: pairs per row, TOP_K, or
    TOP_K + 1 with SHARED.

    y [rows * EACH, hidden]. Pairs whose expert is outside of [first_expert, last_expert) are not
    read. Adds in float32 in the order of k. Grid (rows, ceil(hidden / BLOCK)).
    """
    EACH: tl.constexpr = TOP_K + 1 if SHARED else TOP_K
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + row * TOP_K + k)
        local = (expert >= first_expert) & (expert < last_expert)
        at = (row * EACH + k) * hidden + column
        y = tl.load(y_ptr + at, mask=(column < hidden) & local, other=0.0)
        weight = tl.load(weights_ptr + row * TOP_K + k)
        total += tl.where(local, y.to(tl.float32) * weight, 0.0)
    if SHARED:
        at = (row * EACH + TOP_K) * hidden + column
        total += tl.load(y_ptr + at, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden + column, total.to(out_ptr.dtype.element_ty), column < hidden)
