"""Decode attention over a paged KV cache: one query token per request, few key/value heads.

Flash-decoding: a program handles one request, one key/value head and one of ``splits`` parts of the
cache, for all query heads that share the head. So each key is read once. Scores are computed in the
type of the cache (FP8 matrix instructions on an FP8 cache). Values are multiplied in 16 bits,
because an FP8 product would need them transposed. Launched by
:mod:`attention_worker.kernels.decode_attention`.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(q, factor, k, v0, v1, m, total, acc, left, MASKED: tl.constexpr, P: tl.constexpr):
    """Returns (m, total, acc) after one more tile of the online softmax.

    k: [TILE, DIM]; v0, v1: [TILE / 2, DIM]. With MASKED, only the first ``left`` tokens count.

    m: running maximum of the scores, in log2 units. total: sum of 2^(score - m). acc: sum of the
    values with the same weights. FP8 values are converted in a separate shared buffer. They come in
    halves, because with half a tile there two programs fit on a Hopper multiprocessor.
    """
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        token = tl.arange(0, k.shape[0])
        scores = tl.where((token < left)[None, :], scores, float("-inf"))
    higher = tl.maximum(m, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    old = tl.exp2(m - higher)
    total = total * old + tl.sum(weights, 1)
    pairs = tl.reshape(weights.to(P), (weights.shape[0], 2, weights.shape[1] // 2))
    w0, w1 = tl.split(tl.permute(pairs, (0, 2, 1)))
    v0 = v0.to(P)
    if MASKED:  # 0 * NaN is NaN
        token = tl.arange(0, v0.shape[0])
        v0 = tl.where((token < left)[:, None], v0, 0.0)
    acc = tl.dot(w0, v0, acc * old[:, None])
    v1 = v1.to(P)
    if MASKED:
        v1 = tl.where((token + v0.shape[0] < left)[:, None], v1, 0.0)
    acc = tl.dot(w1, v1, acc)
    return higher, total, acc


@triton.jit
def _entries(row_table, start, last, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Returns the page numbers of TILE tokens from ``start``: a scalar if one page holds them all,
    else [TILE]. Tokens after ``last`` read the entry of ``last``, so no entry beyond the request's
    table is read."""
    token = start if PAGE % TILE == 0 else start + tl.arange(0, TILE)
    return tl.load(row_table + tl.minimum(token, last) // PAGE)


@triton.jit
def _pages(row_table, tile, last, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Returns the page numbers of a tile's keys and of both halves of its values."""
    start = tile * TILE
    pages = _entries(row_table, start, last, TILE, PAGE)
    if PAGE % TILE == 0:
        first, second = pages, pages
    else:
        first = _entries(row_table, start, last, TILE // 2, PAGE)
        second = _entries(row_table, start + TILE // 2, last, TILE // 2, PAGE)
    return pages, first, second


@triton.jit
def _rows(cache, pages, tile, page_stride, token_stride,
          DIM: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Returns keys or values [TILE, DIM] of a tile. Rows beyond the request are arbitrary."""
    dims = tl.arange(0, DIM)
    at = cache + pages.to(tl.int64) * page_stride
    if PAGE % TILE == 0:
        at += tile % (PAGE // TILE) * TILE * token_stride
        rows = at + tl.arange(0, TILE) * token_stride
    else:
        rows = at + (tile * TILE + tl.arange(0, TILE)) % PAGE * token_stride
    return tl.load(rows[:, None] + dims[None, :])


@triton.jit(do_not_specialize=["splits"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    out_ptr, lse_ptr, softmax_scale, q_stride, table_stride, page_stride, token_stride, head_stride,
    splits, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, P: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Computes attention, or with SPLIT its parts for :func:`combine_kernel`.

    q: [requests, KV_HEADS * GROUP, DIM] of the cache's type, row stride q_stride.
    k, v: [pages, PAGE, KV_HEADS, DIM] with equal strides, in elements.
    table: int32 [requests, table_stride]. lengths: int32 [requests]; length 0 gives zeros.
    q_scale, k_scale, v_scale: float32, one element each; read if the cache is FP8.

    Grid (splits, KV_HEADS * ceil(GROUP / BLOCK), requests).
    Without SPLIT, splits is 1 and out is the result, [requests, heads, DIM].
    With SPLIT, out is [requests, heads, splits, DIM]: each part with weights that sum to 1, without
    v_scale. lse [requests, heads, splits] is log2 of the total weight of each part.
    ``splits`` is no constexpr: a server launches many batch sizes and would compile for each.
    """
    split, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    head = tl.program_id(1) % KV_HEADS
    member = tl.program_id(1) // KV_HEADS * BLOCK + tl.arange(0, BLOCK)
    inside = member < GROUP
    heads = head * GROUP + member
    dims = tl.arange(0, DIM)

    q = tl.load(
        q_ptr + request * q_stride + heads[:, None] * DIM + dims[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    factor = softmax_scale * _LOG2E
    SCALED: tl.constexpr = k_ptr.dtype.element_ty.is_fp8()
    if SCALED:
        factor *= tl.load(q_scale_ptr) * tl.load(k_scale_ptr)

    row_table = table_ptr + request * table_stride
    last = length - 1
    tiles = tl.cdiv(length, TILE)
    each = tl.cdiv(tiles, splits)
    first = split * each
    end = tl.minimum(first + each, tiles)
    whole = tl.minimum(end, length // TILE)

    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIM], tl.float32)
    keys, values = k_ptr + head * head_stride, v_ptr + head * head_stride
    HALF: tl.constexpr = TILE // 2
    # Page numbers are read one tile ahead; else the loads of a tile would wait for them.
    pages, pages0, pages1 = _pages(row_table, first, last, TILE, PAGE)
    for tile in tl.range(first, whole, num_stages=STAGES):
        k = _rows(keys, pages, tile, page_stride, token_stride, DIM, TILE, PAGE)
        v0 = _rows(values, pages0, 2 * tile, page_stride, token_stride, DIM, HALF, PAGE)
        v1 = _rows(values, pages1, 2 * tile + 1, page_stride, token_stride, DIM, HALF, PAGE)
        pages, pages0, pages1 = _pages(row_table, tile + 1, last, TILE, PAGE)
        m, total, acc = _attend(q, factor, k, v0, v1, m, total, acc, TILE, False, P)
    if (first < end) & (whole < end):
        k = _rows(keys, pages, whole, page_stride, token_stride, DIM, TILE, PAGE)
        v0 = _rows(values, pages0, 2 * whole, page_stride, token_stride, DIM, HALF, PAGE)
        v1 = _rows(values, pages1, 2 * whole + 1, page_stride, token_stride, DIM, HALF, PAGE)
        left = length - whole * TILE
        m, total, acc = _attend(q, factor, k, v0, v1, m, total, acc, left, True, P)

    share = 1.0 / tl.where(total == 0.0, 1.0, total)  # length 0 gives zeros
    row = request * (KV_HEADS * GROUP) + heads
    if SPLIT:
        where = (row * splits + split) * DIM
        tl.store(lse_ptr + row * splits + split, m + tl.log2(total), mask=inside)
    else:
        where = row * DIM
        if SCALED:
            share *= tl.load(v_scale_ptr)
    tl.store(
        out_ptr + where[:, None] + dims[None, :],
        (acc * share[:, None]).to(out_ptr.dtype.element_ty),
        mask=inside[:, None],
    )


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    parts_ptr, lse_ptr, v_scale_ptr, out_ptr, rows, splits,
    DIM: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Combines parts [rows, splits, DIM] and lse float32 [rows, splits] to out [rows, DIM].

    A row is one query head of one request. LANES: splits rounded up to a power of two.
    Grid (ceil(rows / BLOCK),).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, LANES)
    dims = tl.arange(0, DIM)
    inside = (row < rows)[:, None] & (split < splits)[None, :]
    at = row[:, None] * splits + split[None, :]
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
    top = tl.max(lse, 1)
    weight = tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - top[:, None]))
    total = tl.sum(weight, 1)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    if SCALED:
        share *= tl.load(v_scale_ptr)
    weight *= share[:, None]
    parts = tl.load(
        parts_ptr + at[:, :, None] * DIM + dims[None, None, :], mask=inside[:, :, None], other=0.0
    )
    out = tl.sum(parts.to(tl.float32) * weight[:, :, None], 1)
    tl.store(
        out_ptr + row[:, None] * DIM + dims[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(row < rows)[:, None],
    )
