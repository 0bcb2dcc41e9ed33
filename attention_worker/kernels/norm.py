"""What begins a layer, in one launch. :mod:`attention_worker.fused` launches it and has its
reference."""

import triton
import triton.language as tl

from afd.wire.codecs_triton import fp8_block
from afd.wire.slot_triton import FAR, sum_of_messages


@triton.jit
def norm_fp8(x, weight_ptr, column, inside, size, eps, FP8_MAX: tl.constexpr):
    """RMS norm of float32 x [n], of which ``size`` values are ``inside``, in FP8: (values to
    convert [1, n], scale [1])."""
    variance = tl.sum(x * x, axis=0) / size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return fp8_block((x * tl.rsqrt(variance + eps) * weight)[None, :], FP8_MAX)


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
    x = sum_of_messages(
        payload_ptr, payload_ptr, row, column, hidden, inside,
        far1, far2, far3, far4, far5, far6, far7, MESSAGES, False,
    )  # fmt: skip
    at = residual_ptr + row * hidden + column
    x += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, x.to(residual_ptr.dtype.element_ty), mask=inside)
    code, scale = norm_fp8(x, weight_ptr, column, inside, hidden, eps, FP8_MAX)
    code = code.to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * hidden + column[None, :], code, mask=inside[None, :])
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
