"""Quantised weights of routed experts, in the layouts that block-scaled kernels share."""

from dataclasses import dataclass

import torch

from afd.errors import ConfigError
from afd.wire.codecs import FP8_MAX
from afd.wire.codecs_torch import DTYPE_OF_TAG, dequantise_mxfp4, quantise_mxfp4
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag


@dataclass(frozen=True)
class Weight:
    """Weights [E, N, K] of one projection.

    tag BFLOAT16 (or FLOAT16, FLOAT32): ``codes`` [E, N, K], no scales.
    tag E4M3FN, E4M3FNUZ: ``codes`` FP8 [E, N, K], ``scales`` float32 [E, N/128, K/128].
    tag E2M1: ``codes`` uint8 [E, N, K/2], even columns low; ``scales`` E8M0 uint8 [E, N, K/32].
    """

    tag: Tag
    codes: torch.Tensor
    scales: torch.Tensor | None = None


def quantise_weight(weight: torch.Tensor, tag: Tag) -> Weight:
    """Quantises [E, N, K]: FP8 by blocks of 128 x 128, MXFP4 by rows of 32.

    Raises:
        ConfigError: N or K is not a multiple of the block.
    """
    experts, n, k = weight.shape
    if tag in FP8_MAX:
        if n % SCALE_BLOCK or k % SCALE_BLOCK:
            raise ConfigError(
                f"FP8 experts need sizes divisible by {SCALE_BLOCK}, not {n} x {k}; use bfloat16"
            )
        blocks = weight.float().view(experts, n // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
        scales = blocks.abs().amax(dim=(2, 4)) / FP8_MAX[tag]
        scales = torch.where(scales == 0, 1.0, scales)
        codes = (blocks / scales[:, :, None, :, None]).clamp(-FP8_MAX[tag], FP8_MAX[tag])
        return Weight(tag, codes.to(DTYPE_OF_TAG[tag]).view(experts, n, k), scales)
    if tag == Tag.E2M1:
        if k % MX_BLOCK:
            raise ConfigError(f"MXFP4 experts need sizes divisible by {MX_BLOCK}, not {n} x {k}")
        codes, scales = quantise_mxfp4(weight.reshape(experts * n, k))
        return Weight(tag, codes.view(experts, n, -1), scales.view(experts, n, -1))
    return Weight(tag, weight.to(DTYPE_OF_TAG[tag]))


def dequantise_weight(weight: Weight) -> torch.Tensor:
    """Float32 [E, N, K]."""
    if weight.scales is None:
        return weight.codes.float()
    experts, n, _ = weight.codes.shape
    if weight.tag == Tag.E2M1:
        flat = weight.codes.view(experts * n, -1), weight.scales.view(experts * n, -1)
        return dequantise_mxfp4(*flat, torch.float32).view(experts, n, -1)
    blocks = weight.codes.float().view(experts, n // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
    return (blocks * weight.scales[:, :, None, :, None]).view(experts, n, -1)
