"""Byte layout of a slot and the dtype tags on the wire. Pure; the numbers are the protocol."""

import enum
from dataclasses import dataclass
from functools import cached_property

from afd.errors import ConfigError

SCALE_BLOCK = 128
"""Columns that share one scale in the FP8 format (DeepSeek-V3 report, section 3.3.1)."""
MX_BLOCK = 32
"""Columns that share one scale in the MXFP4 format (OCP Microscaling specification 1.0, 5.1)."""

_ALIGN = 64


class Tag(enum.IntEnum):
    """Payload dtype of a slot. FP8 has two tags, because gfx942 uses another FP8 than gfx950 and
    NVIDIA."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    E4M3FN = 3
    E4M3FNUZ = 4
    E2M1 = 5


class Kind(enum.IntEnum):
    """Kind of a message to an FFN instance."""

    DATA = 0
    LEAVE = 1  # on the control slot: no message follows until further notice
    STEP = 2  # on the control slot: a step of `rows` rows follows, whose doorbells streams ring
    HELLO = 3  # first message of a leader or head (ffn_worker/pool/order_format.py)


@dataclass(frozen=True)
class Encoding:
    """How a tag stores values: bits per element, columns per scale (0: none), bytes per scale."""

    bits: int
    scale_block: int = 0
    scale_bytes: int = 0


ENCODINGS = {
    Tag.FLOAT32: Encoding(32),
    Tag.BFLOAT16: Encoding(16),
    Tag.FLOAT16: Encoding(16),
    Tag.E4M3FN: Encoding(8, SCALE_BLOCK, 4),
    Tag.E4M3FNUZ: Encoding(8, SCALE_BLOCK, 4),
    Tag.E2M1: Encoding(4, MX_BLOCK, 1),
}
FP8_TAGS = {"e4m3fn": Tag.E4M3FN, "e4m3fnuz": Tag.E4M3FNUZ}
"""FP8 kinds by name. The matrix instructions of gfx942 accept e4m3fnuz only."""
TAG_OF_DTYPE = {"float32": Tag.FLOAT32, "bfloat16": Tag.BFLOAT16, "float16": Tag.FLOAT16}


@dataclass(frozen=True)
class SlotLayout:
    """Offsets (bytes) of the parts of one slot; each part starts on a cache line.

    payload [capacity, hidden] of ``tag``; scales [capacity, hidden / columns per scale], float32
    for FP8, E8M0 bytes for MXFP4, absent otherwise; ids int32 [capacity, top_k]; weights float32
    [capacity, top_k]. ``top_k`` is 0 for answers.
    """

    capacity: int
    hidden: int
    top_k: int
    tag: Tag

    @property
    def row_bytes(self) -> int:
        return self.hidden * ENCODINGS[self.tag].bits // 8

    @property
    def scale_columns(self) -> int:
        block = ENCODINGS[self.tag].scale_block
        return self.hidden // block if block else 0

    @property
    def scale_row_bytes(self) -> int:
        return self.scale_columns * ENCODINGS[self.tag].scale_bytes

    @property
    def scales_offset(self) -> int:
        return _align(self.capacity * self.row_bytes)

    @property
    def ids_offset(self) -> int:
        return self.scales_offset + _align(self.capacity * self.scale_row_bytes)

    @property
    def weights_offset(self) -> int:
        return self.ids_offset + _align(self.capacity * self.top_k * 4)

    @property
    def nbytes(self) -> int:
        return self.weights_offset + _align(self.capacity * self.top_k * 4)

    @cached_property
    def _bytes_on_wire(self) -> int:
        """Of one row."""
        return self.row_bytes + self.scale_row_bytes + 8 * self.top_k

    def message_bytes(self, rows: int) -> int:
        """Return the bytes on the wire for ``rows`` rows, without the header."""
        return rows * self._bytes_on_wire


def layouts(
    wire: str, dtype: str, capacity: int, hidden: int, top_k: int, fp8: str = "e4m3fn"
) -> tuple[SlotLayout, SlotLayout]:
    """Return the layouts (attention to FFN, FFN to attention) of a wire format.

    ``exact`` keeps the model dtype in both directions. ``fp8`` sends FP8 with one float32 scale per
    128 columns and returns bfloat16. ``mxfp4`` sends e2m1 with one E8M0 scale per 32 columns and
    returns FP8. The argument ``fp8`` names the FP8 kind for both formats: e4m3fn or e4m3fnuz.

    Raises:
        ConfigError: unknown format, kind or dtype, or a hidden size that the blocks do not divide.
    """
    if dtype not in TAG_OF_DTYPE:
        raise ConfigError(f"dtype {dtype} has no wire tag; use one of {', '.join(TAG_OF_DTYPE)}")
    if fp8 not in FP8_TAGS:
        raise ConfigError(f"unknown wire.fp8 {fp8!r}; use {' or '.join(FP8_TAGS)}")
    tags = {
        "exact": (TAG_OF_DTYPE[dtype], TAG_OF_DTYPE[dtype]),
        "fp8": (FP8_TAGS[fp8], Tag.BFLOAT16),
        "mxfp4": (Tag.E2M1, FP8_TAGS[fp8]),
    }
    if wire not in tags:
        raise ConfigError(f"unknown wire.format {wire!r}; use exact, fp8 or mxfp4")
    tag, back = tags[wire]
    if wire != "exact" and hidden % SCALE_BLOCK:
        raise ConfigError(
            f"wire.format {wire} needs a hidden size divisible by {SCALE_BLOCK}, not {hidden}; "
            "use wire.format exact"
        )
    return SlotLayout(capacity, hidden, top_k, tag), SlotLayout(capacity, hidden, 0, back)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
