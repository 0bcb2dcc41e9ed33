"""Reference codecs of the wire formats, in numpy. Tests check the fast ones against these."""

import ml_dtypes
import numpy as np
import numpy.typing as npt

from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag

FP8_DTYPE = {Tag.E4M3FN: ml_dtypes.float8_e4m3fn, Tag.E4M3FNUZ: ml_dtypes.float8_e4m3fnuz}
FP8_MAX = {Tag.E4M3FN: 448.0, Tag.E4M3FNUZ: 240.0}
"""Largest finite value: e4m3fn as in the OCP 8-bit floating point specification, table 1; e4m3fnuz
as in the CDNA3 instruction set, section 7.2 (no infinity, no negative zero, bias 8)."""

E2M1_EXPONENT = 2
"""Exponent of the largest e2m1 value, 6 = 1.5 * 2^2 (OCP Microscaling specification 1.0, 5.3.3)."""
E8M0_BIAS = 127
E8M0_NAN = 255


def quantise_fp8(
    x: npt.NDArray[np.float32], tag: Tag = Tag.E4M3FN
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Encode as FP8 with one float32 scale per row and 128 columns.

    Args:
        x: float32 [rows, hidden], hidden a multiple of 128.
        tag: E4M3FN or E4M3FNUZ.

    Returns:
        FP8 bits as uint8 [rows, hidden] and scales float32 [rows, hidden/128]. A block of zeros
        has scale 1, so that it decodes to zeros. A NaN or infinity makes its whole block NaN, so
        that a broken activation is noticed and does not saturate.
    """
    rows, hidden = x.shape
    blocks = x.reshape(rows, hidden // SCALE_BLOCK, SCALE_BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    scales = np.where(amax == 0, np.float32(1), amax / np.float32(FP8_MAX[tag])).astype(np.float32)
    # A denormal amax can underflow to scale 0; such a block encodes as zeros.
    scales = np.where(scales == 0, np.float32(1), scales)
    scales = np.where(np.isfinite(amax), scales, np.float32(np.nan))
    with np.errstate(invalid="ignore"):
        values = blocks / scales[..., None]
        # The quotient of a denormal scale can exceed the range; clip to the largest code.
        codes = np.clip(values, -FP8_MAX[tag], FP8_MAX[tag]).astype(FP8_DTYPE[tag])
    return codes.view(np.uint8).reshape(rows, hidden), scales


def dequantise_fp8(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], tag: Tag = Tag.E4M3FN
) -> npt.NDArray[np.float32]:
    """Inverse of :func:`quantise_fp8`: float32 [rows, hidden]."""
    rows, hidden = codes.shape
    values: npt.NDArray[np.float32] = codes.view(FP8_DTYPE[tag]).astype(np.float32)
    values = values.reshape(rows, hidden // SCALE_BLOCK, SCALE_BLOCK) * scales[..., None]
    return values.reshape(rows, hidden)


def quantise_mxfp4(
    x: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """MXFP4: e2m1 elements, one power of two per 32 columns (OCP Microscaling 1.0, section 6.3).

    The scale is 2^(floor(log2(max |x|)) - 2); elements are rounded to the nearest even code and
    saturate at 6 times the scale.

    Args:
        x: float32 [rows, hidden], hidden a multiple of 32.

    Returns:
        codes uint8 [rows, hidden/2], the even column in the low four bits, and E8M0 scales uint8
        [rows, hidden/32]. A block of zeros has scale code 0. A NaN or infinity makes its block's
        scale NaN (255) and its codes 0, so that the whole block decodes to NaN.
    """
    rows, hidden = x.shape
    blocks = x.reshape(rows, hidden // MX_BLOCK, MX_BLOCK)
    amax = np.abs(blocks).max(axis=-1)
    finite = np.isfinite(amax)
    exponent = np.frexp(np.where(finite, amax, 0))[1] - 1 - E2M1_EXPONENT
    exponent = np.where(amax == 0, -E8M0_BIAS, np.maximum(exponent, -E8M0_BIAS))
    values = np.where(finite[..., None], np.ldexp(blocks, -exponent[..., None]), 0)
    codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    nibbles: npt.NDArray[np.uint8] = (codes & np.uint8(15)).reshape(rows, hidden)
    scales = np.where(finite, exponent + E8M0_BIAS, E8M0_NAN).astype(np.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4)), scales


def dequantise_mxfp4(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float32]:
    """Inverse of :func:`quantise_mxfp4`: float32 [rows, hidden]."""
    rows = codes.shape[0]
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1)
    values: npt.NDArray[np.float32] = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    values = values.reshape(rows, -1, MX_BLOCK)
    values = np.ldexp(values, scales[..., None].astype(np.int32) - E8M0_BIAS)
    values = np.where(scales[..., None] == E8M0_NAN, np.float32(np.nan), values)
    return values.reshape(rows, -1).astype(np.float32)
