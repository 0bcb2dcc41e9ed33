"""Codecs of the all-reduce block formats in torch, for rows on a CPU.

Gives the bytes of :mod:`ffn_worker.allreduce.formats_numpy` more than ten times faster: numpy has
no vector instructions for float16. float16 products are computed in float32, where they are exact,
and then rounded to float16. :mod:`ffn_worker.allreduce.formats_table` describes the layout.
"""

import torch
import torch.nn.functional as F

from ffn_worker.allreduce.formats_table import ATOM_VALUES, ReduceFormat

_BYTE_ORDER = (0, 2, 1, 3, 4, 6, 5, 7)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints of neighbouring e2m1 values. Ties round to even: a midpoint with an even index rounds
down, one with an odd index up."""


def encode(x: torch.Tensor, fmt: ReduceFormat) -> torch.Tensor:
    """Encodes float [n], contiguous, to uint8 [ceil(n / 2048), fmt.atom_bytes]; pads with zeros.

    A value beyond float16's range becomes infinity, which makes its block NaN.
    """
    x = F.pad(x.reshape(-1).half(), (0, -x.numel() % ATOM_VALUES))
    if fmt.bits == 16:
        return x.reshape(-1, ATOM_VALUES).view(torch.uint8)
    v = x.float().reshape(-1, 32, 32, 2)  # group of 64, pair, even or odd
    bits = x.view(torch.int16).to(torch.int32).reshape(-1, 32, 32, 2) & 0xFFFF
    key = (((bits << 1) | (bits >> 15)) & 0xFFFF).amax(2)
    m, finite = ((key >> 1) | (key << 15)).to(torch.int16).view(torch.float16), key < 0xF800
    scale = (m.float() * torch.tensor(fmt.factor).half().float()).half().float()
    shifted = (scale + 2.0**-24).half().float()
    narrow = shifted.abs() > 2.0**-16
    lift = torch.where(narrow, 1.0, 512.0)
    inverse = (1 / torch.where(narrow, shifted, scale * lift)).half().float()
    inverse = torch.where(finite & (scale != 0), inverse, 0.0)[:, :, None, :]
    scaled = ((v * lift[:, :, None, :]).half().float() * inverse).half().float()
    scaled = scaled.nan_to_num_(nan=fmt.low).clamp_(fmt.low, fmt.high)
    codes = _codes(scaled, fmt).reshape(-1, 256, 8)
    scale = torch.where(finite, scale, torch.nan).half()
    parts = [*_pack(codes, fmt), scale.reshape(-1, 64)]
    return torch.cat([p.contiguous().view(torch.uint8) for p in parts], dim=1)


def decode(data: torch.Tensor, n: int, fmt: ReduceFormat, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`encode`: returns the first n values."""
    return _decode(data, fmt).reshape(-1)[:n].to(dtype)


def decode_sum(data: torch.Tensor, n: int, fmt: ReduceFormat) -> torch.Tensor:
    """Decodes uint8 [world, atoms, fmt.atom_bytes] and adds in rank order: float16 [n]."""
    total = _decode(data[0], fmt).float()
    for part in data[1:]:
        total += _decode(part, fmt).float()
    return total.reshape(-1)[:n].half()


def _decode(data: torch.Tensor, fmt: ReduceFormat) -> torch.Tensor:
    if fmt.bits == 16:
        return data.view(torch.float16)
    scale = data[:, fmt.code_bytes :].contiguous().view(torch.float16).float()
    codes = _unpack(data[:, : fmt.code_bytes].contiguous(), fmt)
    if fmt.bias:
        values = (codes - fmt.bias).float()
    else:
        sizes = torch.tensor(_E2M1 + tuple(-v for v in _E2M1))
        values = sizes[codes]
    return (values.reshape(-1, 32, 32, 2) * scale.reshape(-1, 32, 1, 2)).half()


def _codes(scaled: torch.Tensor, fmt: ReduceFormat) -> torch.Tensor:
    """int32 codes of float32 values within the format's range."""
    if fmt.bias:
        return scaled.round_().to(torch.int32) + fmt.bias
    size = scaled.abs()
    code = torch.signbit(scaled).to(torch.int32) << 3
    for i, middle in enumerate(_BETWEEN):
        code += size > middle if i % 2 == 0 else size >= middle
    return code


def _pack(v: torch.Tensor, fmt: ReduceFormat) -> list[torch.Tensor]:
    """The code parts of each atom, [atoms, any], as in formats_numpy."""
    if fmt.bits == 8:
        return [v[..., _BYTE_ORDER].to(torch.uint8).reshape(len(v), ATOM_VALUES)]
    i = torch.arange(8, dtype=torch.int32)
    if not fmt.bias:
        return [_or(v << 4 * i)]
    words = _or((v & 15) << (4 * (i // 2) + 16 * (i % 2)))
    if fmt.bits == 4:
        return [words]
    return [words, _or((v >> 4) << 2 * i).to(torch.int16)]


def _or(fields: torch.Tensor) -> torch.Tensor:
    """Combines fields that do not overlap, int32 [..., 8] -> [...]. Words may wrap to negative."""
    return fields.sum(-1, dtype=torch.int32)


def _unpack(data: torch.Tensor, fmt: ReduceFormat) -> torch.Tensor:
    """Inverse of :func:`_pack`: int32 codes [atoms, 256, 8]."""
    atoms = len(data)
    if fmt.bits == 8:
        return data.reshape(atoms, 256, 8)[..., _BYTE_ORDER].to(torch.int32)
    words = data[:, :1024].contiguous().view(torch.int32)[..., None]
    i = torch.arange(8, dtype=torch.int32)
    if not fmt.bias:
        return (words >> 4 * i) & 15
    codes = (words >> (4 * (i // 2) + 16 * (i % 2))) & 15
    if fmt.bits == 6:
        high = data[:, 1024:].contiguous().view(torch.int16).to(torch.int32)[..., None]
        codes |= ((high >> 2 * i) & 3) << 4
    return codes
