"""Fused kernels of an attention half: norms, rotary embedding, paged cache, rows for the wire.

:mod:`attention_worker.kernels.fused_attention` launches them and has their references. Heads have
2 * HALF columns, where HALF is a power of two; rotation pairs the two halves of a head. cos_sin
[positions, 2 * HALF]: cosines, then sines. All compute in float32 and round each result once.
"""

import triton
import triton.language as tl

from afd.wire.codecs_triton import fp8_block

# Slices of micro-batches start anywhere, and a step may store any number of rows. Triton must not
# compile a kernel for each: the first such step may be one that is captured.
_ANY_SIZE = ["stored"]
_ANY_ADDRESS = ["positions_ptr", "slots_ptr"]


@triton.jit
def normed(x, weight, size, eps):
    """Returns the RMS norm of float32 x [n]; only ``size`` values count, the others must be 0."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * weight


@triton.jit
def rotated(first, second, angle_at, HALF: tl.constexpr):
    """Rotates the two halves of heads, float32 [.., HALF]."""
    half = tl.arange(0, HALF)
    cos = tl.load(angle_at + half).to(tl.float32)
    sin = tl.load(angle_at + HALF + half).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def store(at, x, scale_ptr, FP8_MAX: tl.constexpr):
    """Stores x, or x / scale saturated if the target is FP8 (FP8_MAX > 0)."""
    if FP8_MAX > 0:
        x = x * (1.0 / tl.load(scale_ptr))
        x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(at, x.to(at.dtype.element_ty))


@triton.jit
def _head(line, weight_ptr, angle, eps, HALF: tl.constexpr, NORMED: tl.constexpr):
    """Returns both halves of the head at ``line``, normalised if NORMED, and rotated."""
    half = tl.arange(0, HALF)
    first = tl.load(line + half).to(tl.float32)
    second = tl.load(line + HALF + half).to(tl.float32)
    if NORMED:
        square = tl.sum(first * first + second * second, axis=0)
        scale = tl.rsqrt(square / (2 * HALF) + eps)
        first = first * scale * tl.load(weight_ptr + half).to(tl.float32)
        second = second * scale * tl.load(weight_ptr + HALF + half).to(tl.float32)
    return rotated(first, second, angle, HALF)


@triton.jit
def _keep(
    key, value, weight_ptr, angle, eps, to, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr,
    CACHE_MAX: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Stores the head at ``key``, normalised if NORMED and rotated, and the head at ``value``."""
    half = tl.arange(0, HALF)
    first, second = _head(key, weight_ptr, angle, eps, HALF, NORMED)
    store(keys_ptr + to + half, first, key_scale_ptr, CACHE_MAX)
    store(keys_ptr + to + HALF + half, second, key_scale_ptr, CACHE_MAX)
    column = tl.arange(0, 2 * HALF)
    x = tl.load(value + column).to(tl.float32)
    store(values_ptr + to + column, x, value_scale_ptr, CACHE_MAX)


@triton.jit(do_not_specialize=_ANY_SIZE, do_not_specialize_on_alignment=_ANY_ADDRESS)
def heads_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, out_ptr, keys_ptr,
    values_ptr, q_scale_ptr, key_scale_ptr, value_scale_ptr, qkv_stride, q_heads, kv_heads, page,
    block_stride, token_stride, head_stride, stored, eps,
    Q_MAX: tl.constexpr, CACHE_MAX: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """out = queries, normalised per head if NORMED, and rotated. Stores keys (likewise) and values.

    qkv [rows, (q_heads + 2 * kv_heads) * 2 * HALF] (row stride qkv_stride); q_weight, k_weight
    [2 * HALF]; positions int64 [rows]; slots int64 [stored], a negative slot stores nothing, nor
    does a row from ``stored`` on. out [rows, q_heads * 2 * HALF]; if FP8 (Q_MAX > 0), divided by
    q_scale. keys, values [blocks, page, kv_heads, 2 * HALF]; if FP8 (CACHE_MAX > 0), divided by
    key_scale and value_scale; scales float32 [1]. Strides are in elements and equal for both.
    Grid (rows, q_heads + kv_heads); with kv_heads 0 nothing is stored.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)
    line = qkv_ptr + row * qkv_stride
    angle = cos_sin_ptr + tl.load(positions_ptr + row) * 2 * HALF
    if head < q_heads:
        first, second = _head(line + head * 2 * HALF, q_weight_ptr, angle, eps, HALF, NORMED)
        at = out_ptr + (row * q_heads + head) * 2 * HALF + half
        store(at, first, q_scale_ptr, Q_MAX)
        store(at + HALF, second, q_scale_ptr, Q_MAX)
    elif row < stored:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            kv = head - q_heads
            key = line + head * 2 * HALF
            to = slot // page * block_stride + slot % page * token_stride + kv * head_stride
            _keep(
                key, key + kv_heads * 2 * HALF, k_weight_ptr, angle, eps, to, keys_ptr, values_ptr,
                key_scale_ptr, value_scale_ptr, CACHE_MAX, HALF, NORMED,
            )  # fmt: skip


@triton.jit(do_not_specialize=_ANY_SIZE, do_not_specialize_on_alignment=_ANY_ADDRESS)
def low_rank_kernel(
    qkv_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, out_ptr, keys_ptr, values_ptr,
    key_scale_ptr, value_scale_ptr, qkv_stride, low, kv_heads, page, block_stride, token_stride,
    head_stride, stored, eps,
    CACHE_MAX: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = RMS norm of the low-rank queries; rotated keys, and values, are stored.

    qkv [rows, low + kv_heads * 4 * HALF]: queries, keys, values; weight [low]; out [rows, low]. The
    rest as in heads_kernel. BLOCK: a power of two, at least low. Grid (rows, 1 + kv_heads).
    """
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1) - 1
    line = qkv_ptr + row * qkv_stride
    if kv < 0:
        column = tl.arange(0, BLOCK)
        inside = column < low
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
        y = normed(x, weight, low, eps)
        tl.store(out_ptr + row * low + column, y.to(out_ptr.dtype.element_ty), mask=inside)
    elif row < stored:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            angle = cos_sin_ptr + tl.load(positions_ptr + row) * 2 * HALF
            key = line + low + kv * 2 * HALF
            to = slot // page * block_stride + slot % page * token_stride + kv * head_stride
            _keep(
                key, key + kv_heads * 2 * HALF, weight_ptr, angle, eps, to, keys_ptr, values_ptr,
                key_scale_ptr, value_scale_ptr, CACHE_MAX, HALF, False,
            )  # fmt: skip


@triton.jit
def add_norm_encode_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, codes_ptr, scales_ptr, hidden, x_stride, eps,
    FP8_MAX: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """residual += x; out = RMS norm of the residual; codes, scales = out in FP8.

    x [rows, hidden] (row stride x_stride); residual, out [rows, hidden]; weight [hidden]; codes FP8
    [rows, hidden]; scales float32 [rows, hidden / GROUP]. Codes and scales are those of the rounded
    ``out`` (:mod:`afd.wire.codecs_triton`). GROUPS: a power of two, at least hidden / GROUP; hidden
    is a multiple of GROUP. Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < hidden
    at = row * hidden + column
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # The norm is that of the stored residual, as in vLLM's kernel.
    total = x.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + at, total, mask=inside)
    x = total.to(tl.float32)
    square = tl.sum(tl.sum(x * x, axis=1), axis=0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = (x * tl.rsqrt(square / hidden + eps) * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, y, mask=inside)
    code, scale = fp8_block(y.to(tl.float32), FP8_MAX)
    tl.store(codes_ptr + at, code.to(codes_ptr.dtype.element_ty), mask=inside)
    groups = hidden // GROUP
    tl.store(scales_ptr + row * groups + group, scale, mask=group < groups)
