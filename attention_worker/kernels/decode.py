"""Decode attention of one query token per request over a paged cache, for few key/value heads.

Flash-decoding: a program takes one request, one key/value head and one of SPLITS parts of the
cache, and all query heads that share that head at once, so a key is read once. Scores are products
in the cache's own type (FP8 matrix instructions on an FP8 cache); values are multiplied in 16 bits,
because an FP8 product wants them transposed. Only :mod:`attention_worker.decode` launches these.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(q, factor, k, v, seen, m, total, acc, MASKED: tl.constexpr, P: tl.constexpr):
    """One tile of the online softmax. k, v [TILE, DIM]; seen [TILE], read where MASKED.

    m: running maximum of the scores in units of log2; total: sum of 2^(score - m); acc: values
    weighted by the same.
    """
    scores = tl.dot(q, tl.trans(k))
    v = v.to(P)
    if MASKED:
        scores = tl.where(seen[None, :], scores, float("-inf"))
        v = tl.where(seen[:, None], v, 0.0)  # a weight of 0 does not silence a NaN
    higher = tl.maximum(m, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor[:, None] - higher[:, None])
    old = tl.exp2(m - higher)
    total = total * old + tl.sum(weights, 1)
    acc = tl.dot(weights.to(P), v, acc * old[:, None])
    return higher, total, acc


@triton.jit
def _pages(row_table, tile, last, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Pages of a tile's tokens: one number where a page holds whole tiles, else [TILE]. Tokens
    after ``last`` are taken for it, so no entry is read that the request does not have."""
    if PAGE % TILE == 0:
        token = tile * TILE
    else:
        token = tile * TILE + tl.arange(0, TILE)
    return tl.load(row_table + tl.minimum(token, last) // PAGE)


@triton.jit
def _rows(cache, pages, tile, page_stride, token_stride,
          DIM: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Keys or values [TILE, DIM] of a tile. Tokens that its request does not have are some row."""
    dims = tl.arange(0, DIM)
    at = cache + pages.to(tl.int64) * page_stride
    if PAGE % TILE == 0:
        at += tile % (PAGE // TILE) * TILE * token_stride
        rows = at + tl.arange(0, TILE) * token_stride
    else:
        rows = at + (tile * TILE + tl.arange(0, TILE)) % PAGE * token_stride
    return tl.load(rows[:, None] + dims[None, :])


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    out_ptr, lse_ptr, softmax_scale, q_stride, table_stride, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, P: tl.constexpr,
    FP8_MAX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q [requests, KV_HEADS * GROUP, DIM] with row stride q_stride; k, v [pages, PAGE, KV_HEADS,
    DIM] with equal strides, in elements; table int32 [requests, table_stride]; lengths int32.

    Grid (SPLITS, KV_HEADS * ceil(GROUP / BLOCK), requests). With SPLITS 1 ``out`` is the result
    [requests, heads, DIM]. Otherwise it is [requests, heads, SPLITS, DIM], each part weighted to a
    sum of 1 and still without the scale of the values, and lse [requests, heads, SPLITS] holds
    log2 of the parts' weights.

    An FP8 cache: scores and values are multiplied by the scales (float32, one element); a q that is
    not FP8 is quantised here, per head. A request of length 0 gives zeros.
    """
    split, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
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
    factor = tl.full([BLOCK], _LOG2E, tl.float32) * softmax_scale
    SCALED: tl.constexpr = k_ptr.dtype.element_ty.is_fp8()
    if SCALED:
        factor *= tl.load(k_scale_ptr)
        if q_ptr.dtype.element_ty.is_fp8():
            factor *= tl.load(q_scale_ptr)
        else:
            wide = q.to(tl.float32)
            scale = tl.max(tl.abs(wide), 1) / FP8_MAX
            scale = tl.where(scale == 0.0, 1.0, scale)
            q = tl.clamp(wide / scale[:, None], -FP8_MAX, FP8_MAX, tl.PropagateNan.ALL)
            q = q.to(k_ptr.dtype.element_ty)
            factor *= scale

    length = tl.load(lengths_ptr + request)
    row_table = table_ptr + request * table_stride
    tiles = tl.cdiv(length, TILE)
    each = tl.cdiv(tiles, SPLITS)
    first = split * each
    end = tl.minimum(first + each, tiles)
    whole = tl.minimum(end, length // TILE)

    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIM], tl.float32)
    keys, values = k_ptr + head * head_stride, v_ptr + head * head_stride
    seen = tl.arange(0, TILE) < TILE
    # Read one tile ahead, or the loads of a tile would wait for the number of its page.
    pages = _pages(row_table, first, length - 1, TILE, PAGE)
    for tile in tl.range(first, whole, num_stages=STAGES):
        k = _rows(keys, pages, tile, page_stride, token_stride, DIM, TILE, PAGE)
        v = _rows(values, pages, tile, page_stride, token_stride, DIM, TILE, PAGE)
        pages = _pages(row_table, tile + 1, length - 1, TILE, PAGE)
        m, total, acc = _attend(q, factor, k, v, seen, m, total, acc, False, P)
    if (first < end) & (whole < end):
        k = _rows(keys, pages, whole, page_stride, token_stride, DIM, TILE, PAGE)
        v = _rows(values, pages, whole, page_stride, token_stride, DIM, TILE, PAGE)
        seen = whole * TILE + tl.arange(0, TILE) < length
        m, total, acc = _attend(q, factor, k, v, seen, m, total, acc, True, P)

    share = 1.0 / tl.where(total == 0.0, 1.0, total)  # no token: zeros
    row = request * (KV_HEADS * GROUP) + heads
    if SPLITS == 1:
        if SCALED:
            share *= tl.load(v_scale_ptr)
        where = row * DIM
    else:
        where = (row * SPLITS + split) * DIM
        tl.store(lse_ptr + row * SPLITS + split, m + tl.log2(total), mask=inside)
    tl.store(
        out_ptr + where[:, None] + dims[None, :],
        (acc * share[:, None]).to(out_ptr.dtype.element_ty),
        mask=inside[:, None],
    )


@triton.jit
def combine_kernel(
    parts_ptr, lse_ptr, v_scale_ptr, out_ptr, rows,
    DIM: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """parts [rows, SPLITS, DIM], lse float32 [rows, SPLITS] -> out [rows, DIM], a row per query
    head. LANES: SPLITS rounded up to a power of two. Grid (ceil(rows / BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, LANES)
    dims = tl.arange(0, DIM)
    inside = (row < rows)[:, None] & (split < SPLITS)[None, :]
    at = row[:, None] * SPLITS + split[None, :]
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
