"""Wire codecs on a GPU: the kernels of :mod:`afd.wire.codecs_triton` on torch tensors.

Results equal those of :mod:`afd.wire.codecs_torch` byte for byte. Each function is one launch and
copies nothing to the host.
"""

import torch
import triton

from afd.wire import codecs_triton as kernels
from afd.wire.codecs import FP8_MAX
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag

_FP8_GROUPS, _MX_GROUPS = 8, 32
"""Scale blocks per Triton program: 1,024 columns."""


def quantise_fp8(x: torch.Tensor, tag: Tag = Tag.E4M3FN) -> tuple[torch.Tensor, torch.Tensor]:
    """float [rows, hidden] -> (``tag`` [rows, hidden], float32 scales [rows, hidden/128]).

    Rows may be strided; hidden is a multiple of 128.
    """
    rows, hidden = x.shape
    codes = torch.empty((rows, hidden), dtype=DTYPE_OF_TAG[tag], device=x.device)
    scales = torch.empty((rows, hidden // SCALE_BLOCK), dtype=torch.float32, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(hidden, SCALE_BLOCK * _FP8_GROUPS))
        kernels.quantise_fp8_kernel[grid](
            x, codes, scales, hidden, x.stride(0), FP8_MAX[tag], SCALE_BLOCK, _FP8_GROUPS
        )
    return codes, scales


def dequantise_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`quantise_fp8`; both inputs contiguous."""
    rows, hidden = codes.shape
    x = torch.empty((rows, hidden), dtype=dtype, device=codes.device)
    if rows:
        grid = (rows, triton.cdiv(hidden, SCALE_BLOCK * _FP8_GROUPS))
        kernels.dequantise_fp8_kernel[grid](codes, scales, x, hidden, SCALE_BLOCK, _FP8_GROUPS)
    return x


def quantise_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [rows, hidden] -> (uint8 codes [rows, hidden/2], E8M0 uint8 [rows, hidden/32])."""
    rows, hidden = x.shape
    codes = torch.empty((rows, hidden // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, hidden // MX_BLOCK), dtype=torch.uint8, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(hidden, MX_BLOCK * _MX_GROUPS))
        kernels.quantise_mxfp4_kernel[grid](x, codes, scales, hidden, x.stride(0), _MX_GROUPS)
    return codes, scales


def dequantise_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`quantise_mxfp4`; both inputs contiguous."""
    rows, hidden = codes.shape[0], 2 * codes.shape[1]
    x = torch.empty((rows, hidden), dtype=dtype, device=codes.device)
    if rows:
        grid = (rows, triton.cdiv(hidden, MX_BLOCK * _MX_GROUPS))
        kernels.dequantise_mxfp4_kernel[grid](codes, scales, x, hidden, _MX_GROUPS)
    return x
