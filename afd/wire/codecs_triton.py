"""Wire codecs as Triton kernels for CUDA and ROCm, equal byte for byte to :mod:`afd.wire.codecs`.

:mod:`afd.wire.codecs_gpu_torch` launches them. Every division is `tl.div_rn`, because a plain one
is approximate on some targets.
"""

import triton
import triton.language as tl


@triton.jit
def _finite_amax(x, axis: tl.constexpr):
    """Bits of max |x| along ``axis``, float32. A NaN or infinity wins, as its bits are largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis)


@triton.jit
def fp8_block(x, FP8_MAX: tl.constexpr, EXACT: tl.constexpr = True):
    """(x / scale, scale) of float32 x [..., n]: one scale per last axis. The caller converts.

    Not EXACT: multiplies by the reciprocal of the scale, which may round to a neighbouring code and
    treats blocks of numbers below 1e-30 as zeros. On an H200 the exact division takes most of the
    time.
    """
    bits = _finite_amax(x, len(x.shape) - 1)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, FP8_MAX, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    if not EXACT:
        scale = tl.where(scale < 1e-30, 1.0, scale)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    if not EXACT:
        y = x * tl.expand_dims(1.0 / scale, len(x.shape) - 1)
        return tl.clamp(y, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL), scale
    y = tl.div_rn(x, tl.broadcast_to(tl.expand_dims(scale, len(x.shape) - 1), x.shape))
    return tl.clamp(y, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL), scale


@triton.jit
def mxfp4_block(x):
    """(packed e2m1 uint8 [n, 16], E8M0 uint8 [n]) of float32 x [n, 32]."""
    # For a normal number the exponent field is floor(log2) + 127; a denormal's scale is 2^-127.
    field = _finite_amax(x, 1) >> 23
    scale = tl.where(field == 255, 255, tl.maximum(field - 2, 0))
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    code = e2m1_code(x * inverse[:, None])
    code = tl.where(field[:, None] == 255, 0, code)
    low, high = tl.split(tl.reshape(code, (x.shape[0], 16, 2)))
    return low | (high << 4), scale.to(tl.uint8)


@triton.jit
def quantise_fp8_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    hidden,
    x_stride,
    FP8_MAX: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """x [rows, hidden] (row stride ``x_stride``) -> FP8 codes [rows, hidden], float32 scales.

    Grid (rows, ceil(hidden / (GROUP * GROUPS))); hidden a multiple of GROUP.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < hidden
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    y, scale = fp8_block(x, FP8_MAX)
    tl.store(codes_ptr + row * hidden + column, y.to(codes_ptr.dtype.element_ty), mask=inside)
    groups = hidden // GROUP
    tl.store(scales_ptr + row * groups + group, scale, mask=group < groups)


@triton.jit
def dequantise_fp8_kernel(
    codes_ptr, scales_ptr, x_ptr, hidden, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """Inverse of quantise_fp8_kernel, same grid; rounds once to the element type of ``x_ptr``."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < hidden
    codes = tl.load(codes_ptr + row * hidden + column, mask=inside)
    groups = hidden // GROUP
    scale = tl.load(scales_ptr + row * groups + group, mask=group < groups, other=0.0)
    x = codes.to(tl.float32) * scale[:, None]
    tl.store(x_ptr + row * hidden + column, x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def e2m1_code(x):
    """Four-bit e2m1 codes (uint8) of float32 values; to nearest, ties to even, saturates at 6."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.uint8) + (size >= 0.75).to(tl.uint8) + (size > 1.25).to(tl.uint8)
    code += (size >= 1.75).to(tl.uint8) + (size > 2.5).to(tl.uint8)
    code += (size >= 3.5).to(tl.uint8) + (size > 5.0).to(tl.uint8)
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 8
    return code | sign.to(tl.uint8)


@triton.jit
def e2m1_value(code):
    """float32 values of four-bit e2m1 codes."""
    code = code.to(tl.int32)
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent == 0, mantissa * 0x3F000000, normal) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(code):
    """float32 values of E8M0 scales: 2^(code - 127), 255 is NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quantise_mxfp4_kernel(x_ptr, codes_ptr, scales_ptr, hidden, x_stride, GROUPS: tl.constexpr):
    """x [rows, hidden] -> packed e2m1 [rows, hidden/2], E8M0 scales [rows, hidden/32].

    Grid (rows, ceil(hidden / (32 * GROUPS))); hidden a multiple of 32.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=column < hidden, other=0.0).to(tl.float32)
    packed, scale = mxfp4_block(x)
    byte = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(codes_ptr + row * (hidden // 2) + byte, packed, mask=byte < hidden // 2)
    groups = hidden // 32
    tl.store(scales_ptr + row * groups + group, scale, mask=group < groups)


@triton.jit
def dequantise_mxfp4_kernel(codes_ptr, scales_ptr, x_ptr, hidden, GROUPS: tl.constexpr):
    """Inverse of quantise_mxfp4_kernel, same grid; rounds once to the type of ``x_ptr``."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    byte = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(codes_ptr + row * (hidden // 2) + byte, mask=byte < hidden // 2, other=0)
    groups = hidden // 32
    scale = e8m0_value(tl.load(scales_ptr + row * groups + group, mask=group < groups, other=0))
    values = tl.join(e2m1_value(packed & 15), e2m1_value(packed >> 4))
    x = tl.reshape(values, (GROUPS, 32)) * scale[:, None]
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(x_ptr + row * hidden + column, x.to(x_ptr.dtype.element_ty), mask=column < hidden)
