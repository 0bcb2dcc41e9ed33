"""Block formats of the quantised all-reduce as Triton kernels, for CUDA and ROCm.

Byte for byte :mod:`ffn_worker.allreduce.formats`, which describes the layout. One program handles
one atom of 2,048 values. Where a product feeds a sum, a conversion stands between them: without it
a compiler makes one fused operation of both, and the bytes differ from target to target.
"""

import triton
import triton.language as tl

from afd.wire.codecs_triton import e2m1_code, e2m1_value


@triton.jit
def _words(ptr, offset):
    return (ptr + offset).to(tl.pointer_type(tl.uint32), bitcast=True)


@triton.jit
def _halves(ptr, offset, dtype: tl.constexpr):
    return (ptr + offset).to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def quantise_atom(x, FACTOR: tl.constexpr, BITS: tl.constexpr, FP4: tl.constexpr):
    """(codes uint32 [2048], scales float16 [32, 2]) of float16 x [2048].

    With BITS 16 the values are their own codes, and there are no scales.
    """
    if BITS == 16:
        return x, x
    else:
        bias: tl.constexpr = 0 if FP4 else 2 ** (BITS - 1)
        low: tl.constexpr = -6.0 if FP4 else -float(bias)
        high: tl.constexpr = 6.0 if FP4 else float(bias - 1)
        v = tl.reshape(x, (32, 8, 4, 2))  # group of 8 threads, thread, pair, even or odd
        bits = v.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        finite = tl.max(tl.max(bits, axis=2), axis=1) < 0x7C00
        v32 = v.to(tl.float32)
        most = tl.max(tl.max(v32, axis=2), axis=1)
        least = tl.min(tl.min(v32, axis=2), axis=1)
        m = tl.where(tl.abs(most) > tl.abs(least), most, least)
        m = tl.where(finite, m, 0.0)
        scale = (m * tl.full((), FACTOR, tl.float16).to(tl.float32)).to(tl.float16)
        shifted = (scale.to(tl.float32) + 5.9604644775390625e-08).to(tl.float16)
        # 1 / 2^-16 is the first reciprocal that float16 cannot hold; below it, shifted is denormal.
        is_narrow = (shifted.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) > 0x0100
        divisor = tl.where(is_narrow, shifted, scale).to(tl.float32)
        # 1 / divisor, rounded correctly: a Newton step leaves an error of 2^-44, and no quotient by
        # a number of 11 bits is that close to the middle between two float32. The hardware's own
        # quotient is approximate, and an exact one costs a call.
        near = 1.0 / divisor
        quotient = tl.fma(tl.fma(-divisor, near, 1.0), near, near)
        wide = tl.where(scale == 0.0, 0.0, quotient)
        # The product of two float16 values is exact in float32: one product serves both cases.
        inverse = tl.where(is_narrow, quotient.to(tl.float16).to(tl.float32), wide)
        scaled = v32 * inverse[:, None, None, :]
        rounded = scaled.to(tl.float16).to(tl.float32)
        scaled = tl.where(is_narrow[:, None, None, :], rounded, scaled)
        scaled = tl.where(finite[:, None, None, :], scaled, 0.0)
        scaled = tl.minimum(tl.maximum(scaled, low), high)
        if FP4:
            code = e2m1_code(scaled).to(tl.uint32)
        else:
            # Adding 1.5 * 2^23 rounds to the nearest even integer and leaves it in the low bits.
            code = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + bias
            code = code.to(tl.uint32)
        return tl.reshape(code, (2048,)), tl.where(finite, scale, float("nan"))


@triton.jit
def dequantise_atom(code, scale, BITS: tl.constexpr, FP4: tl.constexpr):
    """float32 [2048], exact in float16, of codes and scales as quantise_atom gives them."""
    if BITS == 16:
        return code.to(tl.float32)
    else:
        bias: tl.constexpr = 2 ** (BITS - 1)
        value = e2m1_value(code) if FP4 else (code.to(tl.int32) - bias).to(tl.float32)
        value = tl.reshape(value, (32, 8, 4, 2)) * scale.to(tl.float32)[:, None, None, :]
        return tl.reshape(value.to(tl.float16).to(tl.float32), (2048,))


@triton.jit
def pack_atom(code, scale, data_ptr, BITS: tl.constexpr, FP4: tl.constexpr):
    """Writes codes and scales as one encoded atom at ``data_ptr``."""
    if BITS == 16:
        tl.store(_halves(data_ptr, 0, tl.float16) + tl.arange(0, 2048), code)
    else:
        thread = tl.arange(0, 256)
        if BITS == 8:
            i = tl.arange(0, 4)
            shift = ((i % 2) * 16 + (i // 2) * 8).to(tl.uint32)
            code = tl.reshape(code, (512, 4))
            tl.store(
                _words(data_ptr, 0) + tl.arange(0, 512), tl.sum(code << shift[None, :], axis=1)
            )
        else:
            i = tl.arange(0, 8)
            code = tl.reshape(code, (256, 8))
            shift = (4 * i if FP4 else 4 * (i // 2) + 16 * (i % 2)).to(tl.uint32)
            tl.store(_words(data_ptr, 0) + thread, tl.sum((code & 15) << shift[None, :], axis=1))
            if BITS == 6:
                top = tl.sum((code >> 4) << (2 * i).to(tl.uint32)[None, :], axis=1)
                tl.store(_halves(data_ptr, 1024, tl.uint16) + thread, top.to(tl.uint16))
        place = tl.arange(0, 32)[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(_halves(data_ptr, 256 * BITS, tl.float16) + place, scale)


@triton.jit
def unpack_atom(data_ptr, BITS: tl.constexpr, FP4: tl.constexpr):
    """(codes uint32 [2048], scales float16 [32, 2]) of the encoded atom at ``data_ptr``."""
    if BITS == 16:
        x = tl.load(_halves(data_ptr, 0, tl.float16) + tl.arange(0, 2048))
        return x, x
    else:
        if BITS == 8:
            i = tl.arange(0, 4)
            shift = ((i % 2) * 16 + (i // 2) * 8).to(tl.uint32)
            word = tl.load(_words(data_ptr, 0) + tl.arange(0, 512))
            code = (word[:, None] >> shift[None, :]) & 255
        else:
            thread = tl.arange(0, 256)
            i = tl.arange(0, 8)
            shift = (4 * i if FP4 else 4 * (i // 2) + 16 * (i % 2)).to(tl.uint32)
            word = tl.load(_words(data_ptr, 0) + thread)
            code = (word[:, None] >> shift[None, :]) & 15
            if BITS == 6:
                top = tl.load(_halves(data_ptr, 1024, tl.uint16) + thread).to(tl.uint32)
                code |= ((top[:, None] >> (2 * i).to(tl.uint32)[None, :]) & 3) << 4
        place = tl.arange(0, 32)[:, None] * 2 + tl.arange(0, 2)[None, :]
        scale = tl.load(_halves(data_ptr, 256 * BITS, tl.float16) + place)
        return tl.reshape(code, (2048,)), scale


@triton.jit
def encode_atom(x, data_ptr, FACTOR: tl.constexpr, BITS: tl.constexpr, FP4: tl.constexpr):
    """Writes 2,048 float16 values as one encoded atom at ``data_ptr``."""
    code, scale = quantise_atom(x, FACTOR, BITS, FP4)
    pack_atom(code, scale, data_ptr, BITS, FP4)


@triton.jit
def decode_atom(data_ptr, BITS: tl.constexpr, FP4: tl.constexpr):
    """The 2,048 values of the encoded atom at ``data_ptr``: float32 that float16 holds exactly."""
    code, scale = unpack_atom(data_ptr, BITS, FP4)
    return dequantise_atom(code, scale, BITS, FP4)


@triton.jit
def atom_nbytes(BITS: tl.constexpr):
    """Bytes of an encoded atom."""
    return 4096 if BITS == 16 else 256 * BITS + 128


@triton.jit
def encode_kernel(x_ptr, data_ptr, n, FACTOR: tl.constexpr, BITS: tl.constexpr, FP4: tl.constexpr):
    """x [n] (float16, bfloat16 or float32) -> atoms. Grid (ceil(n / 2048)); pads with zeros.

    A value beyond float16's range becomes infinity, and its block NaN.
    """
    atom = tl.program_id(0).to(tl.int64)
    at = atom * 2048 + tl.arange(0, 2048)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float16)
    nbytes: tl.constexpr = atom_nbytes(BITS)
    encode_atom(x, data_ptr + atom * nbytes, FACTOR, BITS, FP4)


@triton.jit
def decode_kernel(data_ptr, x_ptr, n, BITS: tl.constexpr, FP4: tl.constexpr):
    """Atoms -> x [n]. Grid (ceil(n / 2048))."""
    atom = tl.program_id(0).to(tl.int64)
    nbytes: tl.constexpr = atom_nbytes(BITS)
    x = decode_atom(data_ptr + atom * nbytes, BITS, FP4)
    at = atom * 2048 + tl.arange(0, 2048)
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def decode_sum_kernel(
    data_ptr,
    x_ptr,
    n,
    rank_stride,
    WORLD: tl.constexpr,
    BITS: tl.constexpr,
    FP4: tl.constexpr,
):
    """Sum of WORLD encoded buffers, ``rank_stride`` bytes apart, in rank order -> float16 x [n]."""
    atom = tl.program_id(0).to(tl.int64)
    nbytes: tl.constexpr = atom_nbytes(BITS)
    total = decode_atom(data_ptr + atom * nbytes, BITS, FP4)
    for rank in tl.static_range(1, WORLD):
        part = data_ptr + rank * rank_stride + atom * nbytes
        total += decode_atom(part, BITS, FP4)
    at = atom * 2048 + tl.arange(0, 2048)
    tl.store(x_ptr + at, total.to(x_ptr.dtype.element_ty), mask=at < n)
