"""Stored weights in the schemes that backends compute with, without rounding."""

import torch

from afd.models.stored_torch import StoredParts, decode
from afd.models.weight_format import FP8_BLOCK_SIZE, Layout, WeightFormat
from afd.wire.layout import Tag
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.scheme import Scheme


def held_as(stored: WeightFormat, n: int, k: int) -> Scheme:
    """Returns the scheme in which a weight [n, k] can be held with the numbers of the checkpoint.

    One scale per tensor is a scale per block in which all are equal. PLAIN: it has to be decoded.
    """
    if stored.layout in (Layout.FP8_BLOCK, Layout.FP8_TENSOR):
        whole = n % FP8_BLOCK_SIZE == 0 and k % FP8_BLOCK_SIZE == 0
        return Scheme.FP8_BLOCK if whole else Scheme.PLAIN
    return Scheme.MXFP4 if stored.layout is Layout.MXFP4 else Scheme.PLAIN


def as_weight(stored: WeightFormat, parts: StoredParts) -> Weight:
    """Returns a weight as stored, without rounding: in :func:`held_as`'s scheme, else float32."""
    n, k = stored.size(tuple(parts.codes.shape))
    scheme = held_as(stored, n, k)
    if stored.layout is Layout.PLAIN:
        return Weight.of(parts.codes)
    if scheme is Scheme.PLAIN:
        return Weight.of(decode(stored, parts))
    assert parts.scales is not None
    if scheme is Scheme.MXFP4:
        return Weight(Tag.E2M1, parts.codes.view(n, k // 2), parts.scales.view(torch.uint8))
    blocks = n // FP8_BLOCK_SIZE, k // FP8_BLOCK_SIZE
    scales = parts.scales.float()
    if stored.layout is Layout.FP8_TENSOR:
        return Weight(Tag.E4M3FN, parts.codes, scales.reshape(1, 1).expand(blocks).contiguous())
    return Weight(Tag.E4M3FN, parts.codes, scales.view(blocks))
