"""Norms and FP8 around an attention layer's products, in one launch each.
:mod:`attention_worker.fused` launches them and has their references.

A product comes as the library computed it of FP8 codes, and its scales, of rows and of columns,
apart: they are multiplied where it is read.
"""

import triton
import triton.language as tl

from afd.wire.slot_triton import FAR, sum_of_messages


@triton.jit
def row_fp8(y, FP8_MAX: tl.constexpr):
    """(values to convert, scale) of a row y, float32 [n], with one scale; not finite: NaN.

    Not ``fp8_block`` of afd/wire/codecs_triton.py, which it is like: there a scale below 1e-30
    becomes 1, as in grouped.cu, here none is below 2^-100, as in :mod:`attention_worker.fused`.
    """
    bits = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    scale = tl.maximum(bits.to(tl.float32, bitcast=True) / FP8_MAX, 2.0**-100)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    y = y * (1.0 / scale)
    return tl.clamp(y, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL), scale


@triton.jit
def normed(x, weight, size, eps):
    """RMS norm of float32 x [n], of which ``size`` values are not 0 by being outside."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * weight


@triton.jit(do_not_specialize=FAR)
def sum_norm_quantise_kernel(
    payload_ptr, residual_ptr, weight_ptr, codes_ptr, scale_ptr,
    far1, far2, far3, far4, far5, far6, far7, hidden, eps,
    MESSAGES: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual += sum of MESSAGES answers; codes, scale = RMS norm of it in FP8.

    payload [.., hidden] of the first answer (:mod:`afd.wire.slot_triton`); residual [rows, hidden];
    weight [hidden]; codes FP8 [rows, hidden]; scale float32 [rows]. Adds and norms in float32.
    BLOCK: a power of two from hidden on. Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    at = residual_ptr + row * hidden + column
    residual = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = residual + sum_of_messages(
        payload_ptr, payload_ptr, row, column, hidden, inside,
        far1, far2, far3, far4, far5, far6, far7, MESSAGES, False,
    )  # fmt: skip
    tl.store(at, x.to(residual_ptr.dtype.element_ty), mask=inside)
    code, scale = row_fp8(normed(x, weight, hidden, eps), FP8_MAX)
    tl.store(codes_ptr + row * hidden + column, code.to(codes_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def add_norm_kernel(
    product_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, weight_ptr, out_ptr, hidden, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """residual += product * scales; out = RMS norm of it.

    product, residual, out [rows, hidden]; row_scale float32 [rows], column_scale float32 [hidden];
    weight [hidden]. BLOCK: a power of two from hidden on. Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    at = row * hidden + column
    product = tl.load(product_ptr + at, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(column_scale_ptr + column, mask=inside, other=0.0)
    x = residual + product * scale * tl.load(row_scale_ptr + row)
    tl.store(residual_ptr + at, x.to(residual_ptr.dtype.element_ty), mask=inside)
    y = normed(x, weight, hidden, eps)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantise_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, columns, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr
):
    """codes, scale = x in FP8, one scale per row.

    x [rows, columns]; codes FP8 of that shape; scale float32 [rows]. BLOCK: a power of two from
    columns on. Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    code, scale = row_fp8(x, FP8_MAX)
    tl.store(codes_ptr + row * columns + column, code.to(codes_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)
