"""Plain decoders of every format in which checkpoints store a weight.

Tests compare them with compressed-tensors' and vLLM's own on random inputs
(tests/unit/ffn/test_stored_weights.py).
"""

from dataclasses import dataclass

import torch

from afd.models.weight_format import FP8_BLOCK_SIZE, MX_GROUP, Layout, WeightFormat
from afd.wire.codecs_torch import dequantise_mxfp4

_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of each of eight rows in an AWQ word (vLLM 0.26, auto_awq.py,
``_REVERSE_AWQ_PACK_ORDER``)."""


@dataclass(frozen=True)
class StoredParts:
    """The tensors of one weight, or of a slice of it that ends between blocks and groups.

    Shapes and dtypes: as :class:`afd.models.weight_format.WeightFormat` says, without a leading
    dimension.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)


def decode(stored: WeightFormat, parts: StoredParts) -> torch.Tensor:
    """Returns the values of a weight, float32 [n, k]."""
    n, k = stored.size(tuple(parts.codes.shape))
    if stored.layout is Layout.PLAIN:
        return parts.codes.float()
    assert parts.scales is not None
    scales = parts.scales.float() if parts.scales.is_floating_point() else parts.scales
    match stored.layout:
        case Layout.FP8_BLOCK:
            blocks = scales.view(-(-n // FP8_BLOCK_SIZE), -(-k // FP8_BLOCK_SIZE))
            rows = blocks.repeat_interleave(FP8_BLOCK_SIZE, 0)[:n]
            return parts.codes.float() * rows.repeat_interleave(FP8_BLOCK_SIZE, 1)[:, :k]
        case Layout.FP8_CHANNEL:
            return parts.codes.float() * scales.view(n, 1)
        case Layout.FP8_TENSOR:
            return parts.codes.float() * scales.view(1, 1)
        case Layout.MXFP4:
            codes = parts.codes.reshape(n, k // 2)
            return dequantise_mxfp4(
                codes, parts.scales.view(torch.uint8).view(n, k // MX_GROUP), torch.float32
            )
        case Layout.INT4:
            values, zeros = _nibbles(parts.codes), 8
            by_group = scales
            offsets = _nibbles(parts.zeros.T).T if parts.zeros is not None else None
        case Layout.GPTQ:
            assert parts.zeros is not None
            values, zeros = _nibbles(parts.codes.T), 0
            by_group = scales.T
            offsets = (_nibbles(parts.zeros) + stored.zero_offset).T
        case Layout.AWQ:
            assert parts.zeros is not None
            values, zeros = _nibbles(parts.codes, _AWQ_NIBBLES).T, 0
            by_group = scales.T
            offsets = _nibbles(parts.zeros, _AWQ_NIBBLES).T
        case _:
            raise AssertionError(stored.layout)
    group = _group_of_columns(stored, parts, k)
    spread = by_group[:, group]
    return (values - (zeros if offsets is None else offsets[:, group])) * spread


def _group_of_columns(stored: WeightFormat, parts: StoredParts, k: int) -> torch.Tensor:
    if parts.order is not None:
        return parts.order.long()
    columns = torch.arange(k, device=parts.codes.device)
    return columns // stored.group if stored.group else torch.zeros_like(columns)


def _nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Splits int32 [a, b] into int32 [a, 8 * b]; ``order``: the nibble of each of eight values."""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * 4
    return ((words.unsqueeze(-1) >> shifts) & 15).reshape(words.shape[0], -1)
