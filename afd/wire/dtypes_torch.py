"""Torch dtypes of payloads and scales, by wire tag."""

import torch

from afd.wire.layout import Tag

DTYPE_OF_TAG = {
    Tag.FLOAT32: torch.float32,
    Tag.BFLOAT16: torch.bfloat16,
    Tag.FLOAT16: torch.float16,
    Tag.E4M3FN: torch.float8_e4m3fn,
    Tag.E4M3FNUZ: torch.float8_e4m3fnuz,
    Tag.E2M1: torch.uint8,  # two codes per byte
}
SCALE_DTYPE = {
    Tag.E4M3FN: torch.float32,
    Tag.E4M3FNUZ: torch.float32,
    Tag.E2M1: torch.uint8,  # E8M0 bits
}
