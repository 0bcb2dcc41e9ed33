"""Reference codecs of the wire formats, in numpy. The fast ones are checked against these."""

import ml_dtypes
import numpy as np
import numpy.typing as npt

from afd.wire.layout import SCALE_BLOCK

FP8_MAX = 448.0
"""Largest finite e4m3fn value (OCP 8-bit floating point specification, table 1)."""


def quantise_fp8(
    x: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Per-row, per-128-column FP8 with float32 scales.

    Args:
        x: float32 [rows, hidden], hidden a multiple of 128.

    Returns:
        e4m3fn bits as uint8 [rows, hidden] and scales float32 [rows, hidden/128]. A block of zeros
        has scale 1, so that it decodes to zeros. A NaN or infinity makes its whole block NaN: a
        broken activation must surface, not saturate.
    """
    rows, hidden = x.shape
    blocks = x.reshape(rows, hidden // SCALE_BLOCK, SCALE_BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    scales = np.where(amax == 0, np.float32(1), amax / np.float32(FP8_MAX)).astype(np.float32)
    # A denormal amax can underflow to scale 0; the block is then indistinguishable from zeros.
    scales = np.where(scales == 0, np.float32(1), scales)
    scales = np.where(np.isfinite(amax), scales, np.float32(np.nan))
    with np.errstate(invalid="ignore"):
        codes = (blocks / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8).reshape(rows, hidden), scales


def dequantise_fp8(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Inverse of :func:`quantise_fp8`: float32 [rows, hidden]."""
    rows, hidden = codes.shape
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = values.reshape(rows, hidden // SCALE_BLOCK, SCALE_BLOCK) * scales[..., None]
    return values.reshape(rows, hidden)
