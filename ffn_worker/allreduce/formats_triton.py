"""Codecs of the all-reduce block formats as Triton kernels, for CUDA and ROCm.

They give the bytes of :mod:`ffn_worker.allreduce.formats_numpy`;
:mod:`ffn_worker.allreduce.formats_table` describes the layout. Several atoms of 2,048 values are
handled at once, so that their loads are in flight together.

Values are held in *words* of two float16: an even value in the low half and the next odd value in
the high half. The halves belong to different blocks. Instructions work on both halves at once.
A *pair* is a word of two codes.

Adding 1,536 rounds a float16 to an integer and leaves that integer in the low bits. The other way,
the exponent bits of 1,024 above a code make a float16 again.
"""

import triton
import triton.language as tl


@triton.jit
def _ints(ptr, offset):
    return (ptr + offset).to(tl.pointer_type(tl.uint32), bitcast=True)


@triton.jit
def _shorts(ptr, offset):
    return (ptr + offset).to(tl.pointer_type(tl.uint16), bitcast=True)


@triton.jit
def _on_halves(CUDA: tl.constexpr, ROCM: tl.constexpr, a, b, AMD: tl.constexpr):
    """An instruction on both halves of words.

    Inline assembly, because compilers pair the halves differently and then spend more time on moves
    than on arithmetic.
    """
    b = tl.cast(b, tl.uint32)
    if AMD:
        code: tl.constexpr = ROCM + " $0, $1, $2"
        return tl.inline_asm_elementwise(code, "=v,v,v", [a, b], tl.uint32, True, 1)
    else:
        code: tl.constexpr = CUDA + " $0, $1, $2;"
        return tl.inline_asm_elementwise(code, "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def _times(a, b, AMD: tl.constexpr):
    return _on_halves("mul.rn.f16x2", "v_pk_mul_f16", a, b, AMD)


@triton.jit
def _plus(a, b, AMD: tl.constexpr):
    return _on_halves("add.rn.f16x2", "v_pk_add_f16", a, b, AMD)


@triton.jit
def _most(a, b, AMD: tl.constexpr):
    return _on_halves("max.f16x2", "v_pk_max_f16", a, b, AMD)


@triton.jit
def _least(a, b, AMD: tl.constexpr):
    return _on_halves("min.f16x2", "v_pk_min_f16", a, b, AMD)


@triton.jit
def _both(x: tl.constexpr):
    """The word with the float16 x in both halves."""
    bits = tl.full((), x, tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return bits | (bits << 16)


@triton.jit
def _half(bits):
    """The float16 in the low half of words."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _word(low, high):
    """uint32 of two 16-bit values."""
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def words_of(x, BF16: tl.constexpr, AMD: tl.constexpr):
    """uint32 words [n] of values [2 * n], rounded to float16, or with BF16 to bfloat16."""
    low, high = tl.split(tl.reshape(x.to(tl.float32), (x.shape[0] // 2, 2)))
    if BF16:
        return _word(low.to(tl.bfloat16), high.to(tl.bfloat16))
    elif AMD:
        return _word(low.to(tl.float16), high.to(tl.float16))
    else:
        code: tl.constexpr = "cvt.rn.f16x2.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(code, "=r,f,f", [high, low], tl.uint32, True, 1)


@triton.jit
def _reciprocal(x, AMD: tl.constexpr):
    """float32 1 / x by the hardware's approximation, off by 1 or 2 ulp. x must be normal."""
    if AMD:
        return tl.inline_asm_elementwise("v_rcp_f32 $0, $1", "=v,v", [x], tl.float32, True, 1)
    else:
        code: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(code, "=f,f", [x], tl.float32, True, 1)


@triton.jit
def values_of(words, BF16: tl.constexpr):
    """float32 [2 * n] of words [n] of float16, or with BF16 of bfloat16."""
    if BF16:
        low = (words << 16).to(tl.float32, bitcast=True)
        x = tl.join(low, (words & 0xFFFF0000).to(tl.float32, bitcast=True))
    else:
        x = tl.join(_half(words).to(tl.float32), _half(words >> 16).to(tl.float32))
    return tl.reshape(x, (words.shape[0] * 2,))


@triton.jit
def _scales(low, high, FACTOR: tl.constexpr, AMD: tl.constexpr):
    """Words (scales, lifts, inverses) of two blocks, that of the low and that of the high halves.

    low, high: highest key of each block.
    """
    m = (low >> 16) | (low & 0x8000) | (high & 0x7FFF0000) | ((high & 0x8000) << 16)
    # Word instructions: compilers would fuse the float16 product and sum and round only once.
    scales = _times(m, _both(FACTOR), AMD)
    shifted = _plus(scales, _both(2.0**-24), AMD)
    lift, inverse, scale = _inverse(low, scales, shifted, AMD)
    odd_lift, odd_inverse, odd_scale = _inverse(high, scales >> 16, shifted >> 16, AMD)
    return _word(scale, odd_scale), _word(lift, odd_lift), _word(inverse, odd_inverse)


@triton.jit
def _inverse(key, scale, shifted, AMD: tl.constexpr):
    """(lift, inverse, scale), float16, of one block.

    scale, shifted: words with the bits of its scale, and of scale + 2^-24, in the low half.
    """
    scale = _half(scale)
    # 1 / 2^-16 is the smallest reciprocal that overflows float16.
    is_narrow = (shifted & 0x7FFF) > 0x0100
    lift = tl.where(is_narrow, 1.0, 512.0).to(tl.float16)
    divisor = tl.where(is_narrow, _half(shifted), scale * lift).to(tl.float32)
    # The approximation rounds to the correct float16: no reciprocal of an 11-bit number is close
    # enough to the midpoint of two float16.
    inverse = _reciprocal(divisor, AMD).to(tl.float16)
    is_finite = key < 0x7C000000
    inverse = tl.where(is_finite & (scale != 0.0), inverse, 0.0)
    return lift, inverse, tl.where(is_finite, scale, float("nan"))


@triton.jit
def _per_thread(of_groups):
    """Repeats values of groups, [groups], for the 8 threads of each: [256 * atoms]."""
    threads = tl.broadcast_to(of_groups[:, None], (of_groups.shape[0], 8))
    return tl.reshape(threads, (of_groups.shape[0] * 8,))


@triton.jit
def quantise_atoms(
    words, FACTOR: tl.constexpr, BITS: tl.constexpr, FP4: tl.constexpr, AMD: tl.constexpr
):
    """(pairs uint32 [threads, 4], scales uint32 [threads]) of words [4 * threads].

    scales: words of the even and the odd block's scale, repeated for a group's 8 threads. With
    BITS 16 the values, float16 or bfloat16, are sent as they are, without scales.
    """
    if BITS == 16:
        return words, words
    else:
        groups: tl.constexpr = words.shape[0] // 32
        words = tl.reshape(words, (groups, 8, 4))
        # Keys order by magnitude; of equal magnitudes the negative is higher.
        low = ((words << 16) & 0x7FFF0000) | (words & 0x8000)
        high = (words & 0x7FFF0000) | ((words >> 16) & 0x8000)
        low, high = tl.max(tl.max(low, axis=2), axis=1), tl.max(tl.max(high, axis=2), axis=1)
        scales, lifts, inverses = _scales(low, high, FACTOR, AMD)
        scaled = _times(words, lifts[:, None, None], AMD)
        scaled = _times(scaled, inverses[:, None, None], AMD)
        # Values that are not finite are NaN here and become the lowest code.
        if FP4:
            scaled = _most(scaled, _both(-6.0), AMD)
            # Steps of 1/2 below 2, of 1 below 4, of 2 below 6.
            size = scaled & 0x7FFF7FFF
            code = _plus(_times(size, _both(2.0), AMD), _both(1536.0), AMD)
            code = _least(code, _plus(size, _both(1538.0), AMD), AMD)
            far = _plus(_times(size, _both(0.5), AMD), _both(1540.0), AMD)
            code = _least(_least(code, far, AMD), _both(1543.0), AMD)
            pairs = (code & 0x00070007) | ((scaled >> 12) & 0x00080008)
        else:
            bias: tl.constexpr = 2 ** (BITS - 1)
            code = _most(scaled, _both(-float(bias)), AMD)
            code = _plus(code, _both(1536.0 + bias), AMD)
            pairs = _least(code, _both(1535.0 + 2 * bias), AMD) & (((1 << BITS) - 1) * 0x00010001)
        return tl.reshape(pairs, (groups * 8, 4)), _per_thread(scales)


@triton.jit
def dequantise_atoms(pairs, scales, BITS: tl.constexpr, FP4: tl.constexpr, AMD: tl.constexpr):
    """Words [4 * threads] of pairs and scales as quantise_atoms returns them."""
    if BITS == 16:
        return pairs
    else:
        if FP4:  # e2m1 bits are the top bits of a float16, scaled by 2^-14
            bits = ((pairs & 0x00070007) << 9) | ((pairs & 0x00080008) << 12)
            words = _times(bits, _both(16384.0), AMD)
        else:
            words = _plus(pairs | 0x64006400, _both(-1024.0 - 2 ** (BITS - 1)), AMD)
        words = _times(words, scales[:, None], AMD)
        return tl.reshape(words, (pairs.shape[0] * 4,))


@triton.jit
def _place(THREADS: tl.constexpr, EACH: tl.constexpr, BITS: tl.constexpr):
    """(byte offset of the atom, index within the atom), int32 [256 * atoms * EACH]."""
    i = tl.arange(0, THREADS * EACH)
    return i // (256 * EACH) * atom_nbytes(BITS), i % (256 * EACH)


@triton.jit
def pack_atoms(pairs, scales, data_ptr, atoms, BITS: tl.constexpr, FP4: tl.constexpr):
    """Writes the first ``atoms`` atoms of pairs and scales, encoded, to ``data_ptr``."""
    if BITS == 16:
        i = tl.arange(0, pairs.shape[0])
        tl.store(_ints(data_ptr, 0) + i, pairs, mask=i < atoms * 1024)
    else:
        threads: tl.constexpr = pairs.shape[0]
        begin, thread = _place(threads, 1, BITS)
        inside = tl.arange(0, threads) < atoms * 256
        j = tl.arange(0, 4).to(tl.uint32)[None, :]
        if BITS == 8:
            two = tl.reshape(pairs, (threads * 2, 2))
            words = tl.sum(two << (8 * tl.arange(0, 2).to(tl.uint32))[None, :], axis=1)
            at, number = _place(threads, 2, BITS)
            mask = tl.arange(0, threads * 2) < atoms * 512
            tl.store(_ints(data_ptr, at + number * 4), words, mask=mask)
        elif FP4:
            words = tl.sum(((pairs | (pairs >> 12)) & 255) << (8 * j), axis=1)
            tl.store(_ints(data_ptr, begin + thread * 4), words, mask=inside)
        else:
            words = tl.sum((pairs & 0x000F000F) << (4 * j), axis=1)
            tl.store(_ints(data_ptr, begin + thread * 4), words, mask=inside)
            if BITS == 6:
                top = (pairs >> 4) & 0x00030003
                top = tl.sum(((top | (top >> 14)) & 15) << (4 * j), axis=1).to(tl.uint16)
                tl.store(_shorts(data_ptr, begin + 1024 + thread * 2), top, mask=inside)
        at = begin + 256 * BITS + thread // 8 * 4
        tl.store(_ints(data_ptr, at), scales, mask=inside & (thread % 8 == 0))


@triton.jit
def unpack_atoms(data_ptr, atoms, BITS: tl.constexpr, FP4: tl.constexpr, ATOMS: tl.constexpr):
    """Reads encoded atoms: (pairs, scales) as quantise_atoms returns them.

    Of ATOMS atoms at ``data_ptr`` only the first ``atoms`` are read.
    """
    if BITS == 16:
        i = tl.arange(0, ATOMS * 1024)
        words = tl.load(_ints(data_ptr, 0) + i, mask=i < atoms * 1024)
        return words, words
    else:
        begin, thread = _place(ATOMS * 256, 1, BITS)
        inside = tl.arange(0, ATOMS * 256) < atoms * 256
        j = tl.arange(0, 4).to(tl.uint32)[None, :]
        if BITS == 8:
            at, number = _place(ATOMS * 256, 2, BITS)
            mask = tl.arange(0, ATOMS * 512) < atoms * 512
            words = tl.load(_ints(data_ptr, at + number * 4), mask=mask)
            two = (words[:, None] >> (8 * tl.arange(0, 2).to(tl.uint32))[None, :]) & 0x00FF00FF
            pairs = tl.reshape(two, (ATOMS * 256, 4))
        else:
            words = tl.load(_ints(data_ptr, begin + thread * 4), mask=inside)[:, None]
            if FP4:
                pairs = (words >> (8 * j)) & 255
                pairs = (pairs | (pairs << 12)) & 0x000F000F
            else:
                pairs = (words >> (4 * j)) & 0x000F000F
            if BITS == 6:
                at = begin + 1024 + thread * 2
                top = tl.load(_shorts(data_ptr, at), mask=inside).to(tl.uint32)
                top = (top[:, None] >> (4 * j)) & 15
                pairs |= ((top | (top << 14)) & 0x00030003) << 4
        at = begin + 256 * BITS + thread // 8 * 4
        return pairs, tl.load(_ints(data_ptr, at), mask=inside)


@triton.jit
def encode_atoms(
    words,
    data_ptr,
    atoms,
    FACTOR: tl.constexpr,
    BITS: tl.constexpr,
    FP4: tl.constexpr,
    AMD: tl.constexpr,
):
    """Encodes words [1024 * any] and writes the first ``atoms`` atoms to ``data_ptr``."""
    pairs, scales = quantise_atoms(words, FACTOR, BITS, FP4, AMD)
    pack_atoms(pairs, scales, data_ptr, atoms, BITS, FP4)


@triton.jit
def decode_atoms(
    data_ptr,
    atoms,
    BITS: tl.constexpr,
    FP4: tl.constexpr,
    BF16: tl.constexpr,
    ATOMS: tl.constexpr,
    AMD: tl.constexpr,
):
    """Decodes the atoms at ``data_ptr``: float32 [2048 * ATOMS], each exact in 16 bits."""
    pairs, scales = unpack_atoms(data_ptr, atoms, BITS, FP4, ATOMS)
    return values_of(dequantise_atoms(pairs, scales, BITS, FP4, AMD), BF16)


@triton.jit
def atom_nbytes(BITS: tl.constexpr):
    """Bytes of an encoded atom."""
    return 4096 if BITS == 16 else 256 * BITS + 128


@triton.jit
def encode_kernel(
    x_ptr,
    data_ptr,
    n,
    FACTOR: tl.constexpr,
    BITS: tl.constexpr,
    FP4: tl.constexpr,
    AMD: tl.constexpr,
):
    """Encodes x [n] (float16, bfloat16 or float32). Grid (ceil(n / 2048)); pads with zeros.

    A value beyond float16's range becomes infinity, which makes its block NaN.
    """
    atom = tl.program_id(0).to(tl.int64)
    at = atom * 2048 + tl.arange(0, 2048)
    words = words_of(tl.load(x_ptr + at, mask=at < n, other=0.0), False, AMD)
    nbytes: tl.constexpr = atom_nbytes(BITS)
    encode_atoms(words, data_ptr + atom * nbytes, 1, FACTOR, BITS, FP4, AMD)


@triton.jit
def decode_kernel(data_ptr, x_ptr, n, BITS: tl.constexpr, FP4: tl.constexpr, AMD: tl.constexpr):
    """Decodes atoms to x [n]. Grid (ceil(n / 2048))."""
    atom = tl.program_id(0).to(tl.int64)
    nbytes: tl.constexpr = atom_nbytes(BITS)
    x = decode_atoms(data_ptr + atom * nbytes, 1, BITS, FP4, False, 1, AMD)
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
    AMD: tl.constexpr,
):
    """Decodes WORLD buffers, ``rank_stride`` bytes apart, and adds in rank order: float16 x [n]."""
    atom = tl.program_id(0).to(tl.int64)
    nbytes: tl.constexpr = atom_nbytes(BITS)
    total = decode_atoms(data_ptr + atom * nbytes, 1, BITS, FP4, False, 1, AMD)
    for rank in tl.static_range(1, WORLD):
        part = data_ptr + rank * rank_stride + atom * nbytes
        total += decode_atoms(part, 1, BITS, FP4, False, 1, AMD)
    at = atom * 2048 + tl.arange(0, 2048)
    tl.store(x_ptr + at, total.to(x_ptr.dtype.element_ty), mask=at < n)
