"""Wire codecs in torch, which both workers run. Tests check them against :mod:`afd.wire.codecs`."""

import torch

from afd.wire.codecs import E2M1_EXPONENT, E8M0_BIAS, E8M0_NAN, FP8_MAX
from afd.wire.dtypes_torch import DTYPE_OF_TAG, SCALE_DTYPE
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag


def encode(x: torch.Tensor, tag: Tag) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode float rows [rows, hidden]: payload, and scales or None if the tag has none.

    On a GPU this is one kernel (:mod:`afd.wire.codecs_gpu_torch`), with the same result.
    """
    if tag not in SCALE_DTYPE:
        return x.to(DTYPE_OF_TAG[tag]).contiguous(), None
    if x.is_cuda:
        from afd.wire import codecs_gpu_torch as gpu

        return gpu.quantise_mxfp4(x) if tag == Tag.E2M1 else gpu.quantise_fp8(x, tag)
    return quantise_mxfp4(x) if tag == Tag.E2M1 else quantise_fp8(x, tag)


def decode(
    payload: torch.Tensor, scales: torch.Tensor, tag: Tag, dtype: torch.dtype
) -> torch.Tensor:
    """Decode rows of a tag with scales, rounded once to ``dtype``. One kernel on a GPU."""
    if payload.is_cuda:
        from afd.wire import codecs_gpu_torch as gpu

        dequantise = gpu.dequantise_mxfp4 if tag == Tag.E2M1 else gpu.dequantise_fp8
    else:
        dequantise = dequantise_mxfp4 if tag == Tag.E2M1 else dequantise_fp8
    return dequantise(payload, scales, dtype)


def quantise_fp8(x: torch.Tensor, tag: Tag = Tag.E4M3FN) -> tuple[torch.Tensor, torch.Tensor]:
    """float [rows, hidden] -> (``tag`` [rows, hidden], float32 scales [rows, hidden/128])."""
    rows, hidden = x.shape
    blocks = x.float().view(rows, hidden // SCALE_BLOCK, SCALE_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    scales = amax / FP8_MAX[tag]
    scales = torch.where(scales == 0, 1.0, scales)
    scales = torch.where(amax.isfinite(), scales, torch.nan)
    values = (blocks / scales.unsqueeze(-1)).clamp(-FP8_MAX[tag], FP8_MAX[tag])
    return values.to(DTYPE_OF_TAG[tag]).view(rows, hidden), scales


def dequantise_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`quantise_fp8`, rounded once to ``dtype``."""
    rows, hidden = codes.shape
    blocks = codes.float().view(rows, hidden // SCALE_BLOCK, SCALE_BLOCK)
    return (blocks * scales.unsqueeze(-1)).view(rows, hidden).to(dtype)


def quantise_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [rows, hidden] -> (uint8 codes [rows, hidden/2], E8M0 uint8 [rows, hidden/32])."""
    rows, hidden = x.shape
    blocks = x.float().view(rows, hidden // MX_BLOCK, MX_BLOCK)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    finite = amax.isfinite()
    exponent = torch.frexp(torch.where(finite, amax, 0.0)).exponent - 1 - E2M1_EXPONENT
    exponent = torch.where(amax == 0, -E8M0_BIAS, exponent.clamp(min=-E8M0_BIAS))
    scaled = torch.where(finite, torch.ldexp(blocks, -exponent), 0.0)
    # Round to nearest, ties to the even code: a tie rounds up if the lower code is odd.
    size = scaled.abs()
    codes = (size > 0.25).to(torch.uint8)
    for bound in (0.75, 1.75, 3.5):
        codes += size >= bound
    for bound in (1.25, 2.5, 5.0):
        codes += size > bound
    codes = (codes | (scaled.signbit().to(torch.uint8) << 3)).view(rows, hidden)
    scales = torch.where(finite, exponent + E8M0_BIAS, E8M0_NAN).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales.view(rows, -1)


def dequantise_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`quantise_mxfp4`, rounded once to ``dtype``.

    Computes values instead of looking them up: a table would have to be on the device before a
    graph is captured.
    """
    rows, half = codes.shape
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1)  # [rows, hidden/2, 2]
    size = (nibbles & 7).float()
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6 is convex: the largest of three straight lines.
    values = torch.maximum(torch.maximum(size / 2, size - 2), 2 * size - 8)
    values = torch.where(nibbles > 7, -values, values).view(rows, 2 * half // MX_BLOCK, MX_BLOCK)
    powers = (scales.int() << 23).view(torch.float32)  # a scale code is a float32 exponent field
    powers = torch.where(scales == 0, 2.0**-E8M0_BIAS, powers)
    powers = torch.where(scales == E8M0_NAN, torch.nan, powers)
    return (values * powers.unsqueeze(-1)).view(rows, 2 * half).to(dtype)
