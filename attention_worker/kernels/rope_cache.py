"""What stands between the projections and the attention core: rotary embedding (halves, not
neighbours), FP8, and the paged cache. :mod:`attention_worker.fused` launches them and has their
references.

Heads have 2 * HALF columns, HALF a power of two, and all of them are rotated. cos_sin
[positions, 2 * HALF]: cosines, then sines.
"""

import triton
import triton.language as tl

from attention_worker.kernels.norm import norm_fp8


@triton.jit
def _rotated(at, angle_at, HALF: tl.constexpr):
    """Both halves, float32, of the heads whose first columns ``at`` points to."""
    half = tl.arange(0, HALF)
    cos = tl.load(angle_at + half).to(tl.float32)
    sin = tl.load(angle_at + HALF + half).to(tl.float32)
    first = tl.load(at).to(tl.float32)
    second = tl.load(at + HALF).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store(at, x, scale_ptr, FP8_MAX: tl.constexpr):
    """x / scale, saturated, where the target is FP8 (FP8_MAX > 0), else x."""
    if FP8_MAX > 0:
        x = tl.div_rn(x, tl.zeros(x.shape, tl.float32) + tl.load(scale_ptr))
        x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(at, x.to(at.dtype.element_ty))


@triton.jit
def norm_store_kernel(
    qkv_ptr, weight_ptr, codes_ptr, scale_ptr, cos_sin_ptr, positions_ptr, slots_ptr, keys_ptr,
    values_ptr, key_scale_ptr, value_scale_ptr, qkv_stride, low, page, block_stride, token_stride,
    head_stride, kv_heads, eps,
    FP8_MAX: tl.constexpr, CACHE_MAX: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each row of the first projection [query of low rank | keys | values]: the RMS norm of the
    query in FP8, and the rotated key and the value into the cache.

    qkv [rows, low + 4 * HALF * kv_heads]; weight [low]; codes FP8 [rows, low]; scale float32
    [rows]; positions, slots int64 [rows], a slot below 0: nothing is stored. keys, values
    [blocks, page, kv_heads, 2 * HALF], FP8 (CACHE_MAX > 0) of values over key_scale, value_scale
    float32 [1]; strides in elements, the same for both. BLOCK: a power of two from low on. Grid
    (rows, 1 + kv_heads).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) - 1
    line = qkv_ptr + row * qkv_stride
    if head < 0:
        column = tl.arange(0, BLOCK)
        inside = column < low
        x = tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
        code, scale = norm_fp8(x, weight_ptr, column, inside, low, eps, FP8_MAX)
        code = code.to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + row * low + column[None, :], code, mask=inside[None, :])
        tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    else:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            half = tl.arange(0, HALF)
            to = slot // page * block_stride + slot % page * token_stride + head * head_stride
            angle = cos_sin_ptr + tl.load(positions_ptr + row) * 2 * HALF
            key = line + low + head * 2 * HALF + half
            first, second = _rotated(key, angle, HALF)
            _store(keys_ptr + to + half, first, key_scale_ptr, CACHE_MAX)
            _store(keys_ptr + to + HALF + half, second, key_scale_ptr, CACHE_MAX)
            column = tl.arange(0, 2 * HALF)
            value = tl.load(line + low + (kv_heads + head) * 2 * HALF + column).to(tl.float32)
            _store(values_ptr + to + column, value, value_scale_ptr, CACHE_MAX)


@triton.jit
def rope_quantise_kernel(
    q_ptr, cos_sin_ptr, positions_ptr, out_ptr, scale_ptr, heads,
    FP8_MAX: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """out = q rotated, over scale in FP8 (FP8_MAX > 0), else as it is.

    q, out [rows, heads * 2 * HALF]; positions int64 [rows]; scale float32 [1]. HEADS divides heads.
    Grid (rows, heads / HEADS).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = (row * heads + head[:, None]) * 2 * HALF + tl.arange(0, HALF)[None, :]
    angle = cos_sin_ptr + tl.load(positions_ptr + row) * 2 * HALF
    first, second = _rotated(q_ptr + at, angle, HALF)
    _store(out_ptr + at, first, scale_ptr, FP8_MAX)
    _store(out_ptr + at + HALF, second, scale_ptr, FP8_MAX)
