"""Kernels between the projections and the attention core: rotary embedding, FP8, paged cache.

:mod:`afd_bench.step3.fused_kernels` launches them and has their references. Heads have 2 * HALF
columns, where HALF is a power of two; rotation pairs the two halves of a head. cos_sin
[positions, 2 * HALF]: cosines, then sines. Products are unscaled; their row and column scales are
separate arguments.
"""

import triton
import triton.language as tl

from afd_bench.step3.kernel_norm import row_fp8
from attention_worker.kernels.fused import normed, rotated, store


@triton.jit
def _scaled(at, scale_at, row_scale):
    return tl.load(at).to(tl.float32) * (tl.load(scale_at) * row_scale)


@triton.jit
def norm_store_kernel(
    qkv_ptr, row_scale_ptr, column_scale_ptr, weight_ptr, codes_ptr, scale_ptr, cos_sin_ptr,
    positions_ptr, slots_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, low, page,
    block_stride, token_stride, head_stride, kv_heads, eps,
    FP8_MAX: tl.constexpr, CACHE_MAX: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the FP8 RMS norm of each row's low-rank query; stores its key and value.

    A row of the first projection is [low-rank query | keys | values]. Keys are rotated.

    qkv [rows, low + 4 * HALF * kv_heads] with its scales, float32 [rows] and [columns]; weight
    [low]; codes FP8 [rows, low]; scale float32 [rows]; positions, slots int64 [rows]; a negative
    slot stores nothing. keys, values [blocks, page, kv_heads, 2 * HALF]; if FP8 (CACHE_MAX > 0),
    divided by key_scale and value_scale, float32 [1]. Strides are in elements and equal for both.
    BLOCK: a power of two, at least low. Grid (rows, 1 + kv_heads).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) - 1
    line = qkv_ptr + row * (low + 4 * HALF * kv_heads)
    row_scale = tl.load(row_scale_ptr + row)
    if head < 0:
        column = tl.arange(0, BLOCK)
        inside = column < low
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(column_scale_ptr + column, mask=inside, other=0.0)
        x = tl.load(line + column, mask=inside, other=0.0).to(tl.float32) * (scale * row_scale)
        code, scale = row_fp8(normed(x, weight, low, eps), FP8_MAX)
        tl.store(codes_ptr + row * low + column, code.to(codes_ptr.dtype.element_ty), mask=inside)
        tl.store(scale_ptr + row, scale)
    else:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            half = tl.arange(0, HALF)
            to = slot // page * block_stride + slot % page * token_stride + head * head_stride
            angle = cos_sin_ptr + tl.load(positions_ptr + row) * 2 * HALF
            key = low + head * 2 * HALF + half
            first = _scaled(line + key, column_scale_ptr + key, row_scale)
            key += HALF
            second = _scaled(line + key, column_scale_ptr + key, row_scale)
            first, second = rotated(first, second, angle, HALF)
            store(keys_ptr + to + half, first, key_scale_ptr, CACHE_MAX)
            store(keys_ptr + to + HALF + half, second, key_scale_ptr, CACHE_MAX)
            column = tl.arange(0, 2 * HALF)
            value = low + (kv_heads + head) * 2 * HALF + column
            value = _scaled(line + value, column_scale_ptr + value, row_scale)
            store(values_ptr + to + column, value, value_scale_ptr, CACHE_MAX)


@triton.jit
def rope_quantise_kernel(
    q_ptr, row_scale_ptr, column_scale_ptr, cos_sin_ptr, positions_ptr, out_ptr, scale_ptr, heads,
    FP8_MAX: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """out = q rotated; divided by scale if out is FP8 (FP8_MAX > 0).

    q, out [rows, heads * 2 * HALF], q with its scales, float32 [rows] and [columns]; positions
    int64 [rows]; scale float32 [1]. HEADS divides heads. Grid (rows, heads / HEADS).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = head[:, None] * 2 * HALF + tl.arange(0, HALF)[None, :]
    at = row * heads * 2 * HALF + column
    row_scale = tl.load(row_scale_ptr + row)
    first = _scaled(q_ptr + at, column_scale_ptr + column, row_scale)
    second = _scaled(q_ptr + at + HALF, column_scale_ptr + column + HALF, row_scale)
    angle = cos_sin_ptr + tl.load(positions_ptr + row) * 2 * HALF
    first, second = rotated(first, second, angle, HALF)
    store(out_ptr + at, first, scale_ptr, FP8_MAX)
    store(out_ptr + at + HALF, second, scale_ptr, FP8_MAX)
