"""Rows in wire format, as they go from a slot to the experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from afd.wire.codecs_torch import decode, encode
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import Tag

_TAG_OF = {DTYPE_OF_TAG[tag]: tag for tag in (Tag.FLOAT32, Tag.BFLOAT16, Tag.FLOAT16)}


@dataclass(frozen=True)
class EncodedRows:
    """Rows [rows, hidden] in the format ``tag``; some kernels multiply them without decoding.

    FLOAT32, BFLOAT16, FLOAT16: ``payload`` [rows, hidden], no scales.
    E4M3FN, E4M3FNUZ: ``payload`` FP8 [rows, hidden], ``scales`` float32 [rows, hidden/128].
    E2M1: ``payload`` uint8 [rows, hidden/2], even columns low; ``scales`` E8M0 uint8
    [rows, hidden/32].
    """

    tag: Tag
    payload: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def of(cls, x: torch.Tensor, tag: Tag | None = None) -> "EncodedRows":
        """Encode float rows ``x`` as ``tag``; None: keep their dtype, without a copy."""
        if tag is None:
            return cls(_TAG_OF[x.dtype], x)
        return cls(tag, *encode(x, tag))

    def __len__(self) -> int:
        return self.payload.shape[0]

    @property
    def device(self) -> torch.device:
        return self.payload.device

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Decode to ``dtype`` [rows, hidden], rounded once; payload itself if nothing changes."""
        if self.scales is None:
            return self.payload.to(dtype)
        return decode(self.payload, self.scales, self.tag, dtype)


def cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`torch.cat` along the first dimension, also for FP8, which not every device supports."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
