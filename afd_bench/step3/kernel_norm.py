"""Fused norm and FP8 kernels of an attention layer.

:mod:`afd_bench.step3.fused_kernels` launches them and has their references. Products of FP8 codes
are unscaled; the kernels multiply them by the separate row and column scales.
"""

import triton
import triton.language as tl

from afd.wire.slot_triton import FAR, sum_of_messages
from attention_worker.kernels.fused import normed


@triton.jit
def row_fp8(y, FP8_MAX: tl.constexpr):
    """Returns (scaled values, scale) of a row y, float32 [n]; NaN if a value is not finite.

    Differs from ``fp8_block`` of afd/wire/codecs_triton.py: there a scale below 1e-30 becomes 1, as
    in grouped.cu; here the smallest scale is 2^-100.
    """
    bits = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    scale = tl.maximum(bits.to(tl.float32, bitcast=True) / FP8_MAX, 2.0**-100)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    y = y * (1.0 / scale)
    return tl.clamp(y, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL), scale


@triton.jit(do_not_specialize=FAR)
def sum_norm_quantise_kernel(
    payload_ptr, residual_ptr, weight_ptr, codes_ptr, scale_ptr,
    far1, far2, far3, far4, far5, far6, far7, hidden, eps,
    MESSAGES: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual += sum of MESSAGES answers; codes, scale = RMS norm of the residual in FP8.

    payload [.., hidden] of the first answer (:mod:`afd.wire.slot_triton`); residual [rows, hidden];
    weight [hidden]; codes FP8 [rows, hidden]; scale float32 [rows]. Computes in float32. BLOCK: a
    power of two, at least hidden. Grid (rows).
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
    """residual += product * scales; out = RMS norm of the residual.

    product, residual, out [rows, hidden]; row_scale float32 [rows], column_scale float32 [hidden];
    weight [hidden]. BLOCK: a power of two, at least hidden. Grid (rows).
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
    """codes, scale = x in FP8 with one scale per row.

    x [rows, columns]; codes FP8 [rows, columns]; scale float32 [rows]. BLOCK: a power of two, at
    least columns. Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    code, scale = row_fp8(x, FP8_MAX)
    tl.store(codes_ptr + row * columns + column, code.to(codes_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)
