"""Block formats of the quantised all-reduce, as byte-exact references in numpy.

The layout is QuickReduce's (vLLM 0.26, csrc/quickreduce/quick_reduce_impl.cuh, `CodecQ4`,
`CodecQ6`, `CodecQ8`; AITER has the same INT4 and INT6). Data moves in atoms of 2,048 float16
values (4 KiB: 256 threads of 8 values; 8 atoms are a 32 KiB tile). A scale covers 32 values: the
even or the odd ones of 64 neighbours. An encoded atom is its codes, thread by thread, then 64
float16 scales, even and odd of each group of 64 side by side.

FP4 is the format of the blog article "QuickReduce FP4 Quantization and Benchmarking on MI355":
e2m1 codes with a float16 scale, where OCP's MXFP4 has a power of two. FP16 is the plain values,
without scales: only sums and bfloat16 rows lose by it.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

ATOM_VALUES = 2048
"""Values of one atom; a buffer is padded to a multiple of it."""
TILE_ATOMS = 8
"""Atoms of one tile. In a two-shot reduction among W ranks, rank r reduces 8/W of them."""
BLOCK = 32
_THREADS, _PER_THREAD, _GROUPS = 256, 8, 32
_EPSILON = np.float16(2**-24)


@dataclass(frozen=True)
class ReduceFormat:
    """One block format. ``factor`` times the signed value of largest magnitude is the scale.

    bits: bits of one code. low, high: range of the scaled values. bias: what makes a rounded value
    an unsigned code (INT formats).
    """

    name: str
    bits: int
    factor: float
    low: float
    high: float
    bias: int

    @property
    def is_fp4(self) -> bool:
        return self.bits == 4 and not self.bias

    @property
    def code_bytes(self) -> int:
        return ATOM_VALUES * self.bits // 8

    @property
    def atom_bytes(self) -> int:
        """Bytes of an encoded atom."""
        return self.code_bytes + (ATOM_VALUES // BLOCK * 2 if self.bits < 16 else 0)

    @property
    def bits_per_value(self) -> float:
        return self.atom_bytes * 8 / ATOM_VALUES


def _integer(bits: int) -> ReduceFormat:
    half = 1 << (bits - 1)
    return ReduceFormat(f"int{bits}", bits, -1 / half, -half, half - 1, half)


INT8, INT6, INT4 = _integer(8), _integer(6), _integer(4)
FP4 = ReduceFormat("fp4", 4, 1 / 6, -6, 6, 0)
FP16 = ReduceFormat("fp16", 16, 1, -65504, 65504, 0)
FORMATS = {f.name: f for f in (FP16, INT8, INT6, INT4, FP4)}


def encode(x: npt.NDArray[np.float16], fmt: ReduceFormat) -> npt.NDArray[np.uint8]:
    """Encodes whole atoms.

    scale = factor * m with m the signed value of largest magnitude (of equal ones the negative),
    code = round(x / (scale + 2^-24)), every step in float16 as QuickReduce does. Where the
    reciprocal overflows float16 (max |x| below about 2^-16 / |factor|) QuickReduce's own encoder
    saturates and loses the block; here such a block is lifted by 2^9 first and divided by its scale
    alone, which any decoder of the format reads. A NaN or infinity makes its block's scale NaN, so
    that the sum shows it; QuickReduce drops NaN.

    Args:
        x: float16 [n], n a multiple of 2,048.

    Returns:
        uint8 [n / 2048, fmt.atom_bytes].
    """
    if fmt is FP16:
        return x.reshape(-1, ATOM_VALUES).view(np.uint8)
    atoms = x.reshape(-1, _GROUPS, 8, 4, 2)  # group of 8 threads, thread, pair, even or odd
    bits = atoms.view(np.uint16)
    key = ((bits << 1) | (bits >> 15)).max(axis=(2, 3))
    m, finite = ((key >> 1) | (key << 15)).view(np.float16), key < 0xF800
    with np.errstate(all="ignore"):
        scale = m * np.float16(fmt.factor)
        shifted = scale + _EPSILON
        narrow = np.abs(shifted) > np.float16(2**-16)
        lift = np.where(narrow, np.float16(1), np.float16(512))
        divisor = np.where(narrow, shifted, scale * lift).astype(np.float32)
        inverse = (np.float32(1) / divisor).astype(np.float16)
        inverse = np.where(finite & (scale != 0), inverse, np.float16(0))
        scaled = atoms * lift[:, :, None, None] * inverse[:, :, None, None]
    scaled = np.where(np.isnan(scaled), np.float32(fmt.low), scaled.astype(np.float32))
    scaled = np.clip(scaled, np.float32(fmt.low), np.float32(fmt.high))
    codes = _codes(scaled.reshape(-1, _THREADS, _PER_THREAD), fmt)
    scale = np.where(finite, scale, np.float16(np.nan))
    parts = [*_pack(codes, fmt), scale.reshape(-1, 2 * _GROUPS)]
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], axis=1)


def decode(data: npt.NDArray[np.uint8], fmt: ReduceFormat) -> npt.NDArray[np.float16]:
    """Inverse of :func:`encode`: float16 [n] from uint8 [atoms, fmt.atom_bytes]."""
    if fmt is FP16:
        return np.ascontiguousarray(data).view(np.float16).reshape(-1)
    scale = np.ascontiguousarray(data[:, fmt.code_bytes :]).view(np.float16)
    codes = _unpack(np.ascontiguousarray(data[:, : fmt.code_bytes]), fmt)
    if fmt.bias:
        values = (codes.astype(np.int32) - fmt.bias).astype(np.float16)
    else:
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float16)
    values = values.reshape(-1, _GROUPS, 8, 4, 2)
    with np.errstate(over="ignore"):
        return (values * scale.reshape(-1, _GROUPS, 1, 1, 2)).reshape(-1)


def decode_sum(data: npt.NDArray[np.uint8], fmt: ReduceFormat) -> npt.NDArray[np.float16]:
    """Sum over ranks of what they sent: uint8 [world, atoms, atom_bytes] -> float16 [n].

    Adds in float32 in rank order and rounds once (QuickReduce adds in float16).
    """
    total = decode(data[0], fmt).astype(np.float32)
    for part in data[1:]:
        total += decode(part, fmt).astype(np.float32)
    with np.errstate(over="ignore"):
        return total.astype(np.float16)


def _codes(scaled: npt.NDArray[np.float32], fmt: ReduceFormat) -> npt.NDArray[np.uint8]:
    if fmt.bias:
        return (np.rint(scaled).astype(np.int32) + fmt.bias).astype(np.uint8)
    return scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def _pack(codes: npt.NDArray[np.uint8], fmt: ReduceFormat) -> list[npt.NDArray]:
    """The code parts of each atom, [atoms, any]: all threads' part 1, then all threads' part 2.

    INT8: bytes v0 v2 v1 v3 v4 v6 v5 v7. INT4: a 32-bit word with even values in the four nibbles
    of the low half, odd ones in the high half. INT6: that word for the low four bits, then a
    16-bit word with the high two bits of v0 to v7 in order. FP4: nibbles in order.
    """
    v = codes.astype(np.uint32)
    if fmt.bits == 8:
        return [codes[..., [0, 2, 1, 3, 4, 6, 5, 7]].reshape(len(codes), -1)]
    if fmt is FP4:
        return [sum(v[..., i] << np.uint32(4 * i) for i in range(8))]
    words = sum((v[..., i] & 15) << np.uint32(4 * (i // 2) + 16 * (i % 2)) for i in range(8))
    if fmt.bits == 4:
        return [words]
    return [words, sum((v[..., i] >> 4) << np.uint32(2 * i) for i in range(8)).astype(np.uint16)]


def _unpack(data: npt.NDArray[np.uint8], fmt: ReduceFormat) -> npt.NDArray[np.uint8]:
    """Inverse of :func:`_pack`: uint8 codes [atoms, 256, 8]."""
    atoms = len(data)
    if fmt.bits == 8:
        return data.reshape(atoms, _THREADS, _PER_THREAD)[..., [0, 2, 1, 3, 4, 6, 5, 7]]
    words = data[:, :1024].view(np.uint32)[..., None]
    i = np.arange(8, dtype=np.uint32)
    if fmt is FP4:
        return ((words >> (4 * i)) & 15).astype(np.uint8)
    codes = (words >> (4 * (i // 2) + 16 * (i % 2))) & 15
    if fmt.bits == 6:
        high = np.ascontiguousarray(data[:, 1024:]).view(np.uint16).astype(np.uint32)[..., None]
        codes |= ((high >> (2 * i)) & 3) << np.uint32(4)
    return codes.astype(np.uint8)
