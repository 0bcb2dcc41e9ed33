"""Codecs of the all-reduce block formats in numpy: the byte-exact reference.

:mod:`ffn_worker.allreduce.formats_table` describes the layout.
"""

from collections.abc import Iterable
from functools import reduce

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ffn_worker.allreduce.formats_table import ATOM_VALUES, FP4, FP16, ReduceFormat

_THREADS, _PER_THREAD, _GROUPS = 256, 8, 32
_EPSILON = np.float16(2**-24)


def encode(x: npt.NDArray[np.float16], fmt: ReduceFormat) -> npt.NDArray[np.uint8]:
    """Encodes whole atoms.

    scale = factor * m, where m is the signed value of largest magnitude; of two values of equal
    magnitude the negative one counts. code = round(x / (scale + 2^-24)). Every step is in float16,
    as in QuickReduce, with two differences:

    - If the reciprocal overflows float16 (max |x| below about 2^-16 / |factor|), QuickReduce's
      encoder saturates and loses the block. Here the block is multiplied by 2^9 first and divided
      by its scale alone. Every decoder of the format can read the result.
    - A NaN or infinity makes the scale of its block NaN, so that the sum shows it. QuickReduce
      drops NaN.

    Args:
        x: float16 [n], n a multiple of 2,048.

    Returns:
        uint8 [n / 2048, fmt.atom_bytes].
    """
    if fmt is FP16:
        return x.reshape(-1, ATOM_VALUES).view(np.uint8)
    atoms = x.reshape(-1, _GROUPS, 8, 4, 2)  # group of 8 threads, thread, pair, even/odd
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
    finite_scaled = np.where(np.isnan(scaled), np.float32(fmt.low), scaled.astype(np.float32))
    clipped = np.clip(finite_scaled, np.float32(fmt.low), np.float32(fmt.high))
    codes = _codes(clipped.reshape(-1, _THREADS, _PER_THREAD), fmt)
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
    """Sum over ranks of encoded atoms: uint8 [world, atoms, atom_bytes] -> float16 [n].

    Adds in float32 in rank order and rounds once. QuickReduce adds in float16.
    """
    total = decode(data[0], fmt).astype(np.float32)
    for part in data[1:]:
        total += decode(part, fmt).astype(np.float32)
    with np.errstate(over="ignore"):
        return total.astype(np.float16)


def _codes(scaled: npt.NDArray[np.float32], fmt: ReduceFormat) -> npt.NDArray[np.uint8]:
    if fmt.bias:
        codes: npt.NDArray[np.int32] = np.rint(scaled).astype(np.int32) + fmt.bias
        return codes.astype(np.uint8)
    bits: npt.NDArray[np.uint8] = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    low: npt.NDArray[np.uint8] = bits & np.uint8(15)
    return low


def _pack(codes: npt.NDArray[np.uint8], fmt: ReduceFormat) -> list[npt.NDArray[np.unsignedinteger]]:
    """The code parts of each atom, [atoms, any]: part 1 of all threads, then part 2 of all.

    Each thread has 8 values, v0 to v7. INT8: bytes v0 v2 v1 v3 v4 v6 v5 v7. INT4: one 32-bit word,
    even values in the four nibbles of the low half, odd values in the high half. INT6: that word
    for the low four bits (part 1), then a 16-bit word with the high two bits of v0 to v7 (part 2).
    FP4: nibbles in order.
    """
    v = codes.astype(np.uint32)
    if fmt.bits == 8:
        return [codes[..., [0, 2, 1, 3, 4, 6, 5, 7]].reshape(len(codes), -1)]
    if fmt is FP4:
        return [_or(v[..., i] << np.uint32(4 * i) for i in range(8))]
    words = _or(
        (v[..., i] & np.uint32(15)) << np.uint32(4 * (i // 2) + 16 * (i % 2)) for i in range(8)
    )
    if fmt.bits == 4:
        return [words]
    return [
        words,
        _or((v[..., i] >> np.uint32(4)) << np.uint32(2 * i) for i in range(8)).astype(np.uint16),
    ]


def _or(fields: Iterable[npt.NDArray[np.uint32]]) -> npt.NDArray[np.uint32]:
    return reduce(np.bitwise_or, fields)


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
