"""Byte layout of a slot and the dtype tags on the wire. Pure; the numbers are the protocol."""

import enum
from dataclasses import dataclass

from afd.errors import ConfigError

SCALE_BLOCK = 128
"""Columns that share one scale in the FP8 format (DeepSeek-V3 report, section 3.3.1)."""

_ALIGN = 64


class Tag(enum.IntEnum):
    """Payload dtype of a slot. gfx942 uses another FP8 than gfx950 and NVIDIA: hence a tag."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    E4M3FN = 3
    E4M3FNUZ = 4


class Kind(enum.IntEnum):
    """What a message means to the FFN loop."""

    DATA = 0
    LEAVE = 1  # on the control slot: nothing is coming until further notice
    STEP = 2  # on the control slot: a step of `rows` rows follows whose doorbells streams ring


TAG_BYTES = {Tag.FLOAT32: 4, Tag.BFLOAT16: 2, Tag.FLOAT16: 2, Tag.E4M3FN: 1, Tag.E4M3FNUZ: 1}
TAG_OF_DTYPE = {"float32": Tag.FLOAT32, "bfloat16": Tag.BFLOAT16, "float16": Tag.FLOAT16}


@dataclass(frozen=True)
class SlotLayout:
    """Offsets (bytes) of the parts of one slot; each part starts on a cache line.

    payload [capacity, hidden] of ``tag``; scales float32 [capacity, hidden/128] (FP8 only);
    ids int32 [capacity, top_k]; weights float32 [capacity, top_k]. ``top_k`` is 0 on the way back.
    """

    capacity: int
    hidden: int
    top_k: int
    tag: Tag

    @property
    def row_bytes(self) -> int:
        return self.hidden * TAG_BYTES[self.tag]

    @property
    def scale_columns(self) -> int:
        return self.hidden // SCALE_BLOCK if self.tag in (Tag.E4M3FN, Tag.E4M3FNUZ) else 0

    @property
    def scales_offset(self) -> int:
        return _align(self.capacity * self.row_bytes)

    @property
    def ids_offset(self) -> int:
        return self.scales_offset + _align(self.capacity * self.scale_columns * 4)

    @property
    def weights_offset(self) -> int:
        return self.ids_offset + _align(self.capacity * self.top_k * 4)

    @property
    def nbytes(self) -> int:
        return self.weights_offset + _align(self.capacity * self.top_k * 4)

    def message_bytes(self, rows: int) -> int:
        """Bytes on the wire for ``rows`` rows (without the header)."""
        return rows * (self.row_bytes + 4 * self.scale_columns + 8 * self.top_k)


def layouts(
    wire: str, dtype: str, capacity: int, hidden: int, top_k: int
) -> tuple[SlotLayout, SlotLayout]:
    """(attention to FFN, FFN to attention) layouts of a wire format.

    ``exact`` keeps the model dtype both ways; ``fp8`` sends e4m3fn with one float32 scale per 128
    columns and returns bfloat16.

    Raises:
        ConfigError: unknown format or dtype, or a hidden size that FP8 blocks do not divide.
    """
    if dtype not in TAG_OF_DTYPE:
        raise ConfigError(f"dtype {dtype} has no wire tag; use one of {', '.join(TAG_OF_DTYPE)}")
    if wire == "exact":
        tag = back = TAG_OF_DTYPE[dtype]
    elif wire == "fp8":
        if hidden % SCALE_BLOCK:
            raise ConfigError(
                f"wire.format fp8 needs a hidden size divisible by {SCALE_BLOCK}, not {hidden}; "
                "use wire.format exact"
            )
        tag, back = Tag.E4M3FN, Tag.BFLOAT16
    else:
        raise ConfigError(f"unknown wire.format {wire!r}; use exact or fp8")
    return SlotLayout(capacity, hidden, top_k, tag), SlotLayout(capacity, hidden, 0, back)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
