"""Wire codecs in torch: what both workers run. Checked against :mod:`afd.wire.codecs`."""

import torch

from afd.wire.codecs import FP8_MAX
from afd.wire.layout import SCALE_BLOCK, Tag

DTYPE_OF_TAG = {
    Tag.FLOAT32: torch.float32,
    Tag.BFLOAT16: torch.bfloat16,
    Tag.FLOAT16: torch.float16,
    Tag.E4M3FN: torch.float8_e4m3fn,
    Tag.E4M3FNUZ: torch.float8_e4m3fnuz,
}


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [rows, hidden] -> (float8_e4m3fn [rows, hidden], float32 scales [rows, hidden/128])."""
    rows, hidden = x.shape
    blocks = x.float().view(rows, hidden // SCALE_BLOCK, SCALE_BLOCK)
    amax = blocks.abs().amax(dim=-1)
    scales = amax / FP8_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    scales = torch.where(amax.isfinite(), scales, torch.nan)
    codes = (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.view(rows, hidden), scales


def dequantise_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`quantise_fp8`, rounded once to ``dtype``."""
    rows, hidden = codes.shape
    blocks = codes.float().view(rows, hidden // SCALE_BLOCK, SCALE_BLOCK)
    return (blocks * scales.unsqueeze(-1)).view(rows, hidden).to(dtype)
