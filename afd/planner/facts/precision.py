"""Number formats: bytes per value, and the formats that one deployment uses where."""

from dataclasses import dataclass

from afd.errors import ConfigError
from afd.wire.layout import layouts

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "mxfp4": 17 / 32,  # 16 bytes of values and one scale byte per block of 32 (OCP MX v1.0)
}

WIRE_FORMATS = ("exact", "fp8", "mxfp4")
"""Formats that can be modelled: those of afd/wire/layout.py."""


def dtype_bytes(dtype: str) -> float:
    """Bytes per value, block scales of mxfp4 included. Raises ConfigError for an unknown name."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"number format {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Precision:
    """Number formats of one deployment, names from DTYPE_BYTES.

    attention_weights: projections before and after attention, router. ffn_weights: dense and expert
    FFN weights. kv: KV cache. attention_math: inputs of the attention core's matrix products.
    head: embedding and LM head. activations: hidden states (what ``exact`` puts on the wire).
    wire: one of WIRE_FORMATS.
    """

    attention_weights: str = "fp8"
    ffn_weights: str = "fp8"
    kv: str = "fp8"
    attention_math: str = "fp8"
    head: str = "bfloat16"
    activations: str = "bfloat16"
    wire: str = "fp8"

    def __post_init__(self) -> None:
        for dtype in (
            self.attention_weights,
            self.ffn_weights,
            self.kv,
            self.attention_math,
            self.head,
            self.activations,
        ):
            dtype_bytes(dtype)
        if self.wire not in WIRE_FORMATS:
            raise ConfigError(
                f"wire format {self.wire!r} is unknown; use one of {', '.join(WIRE_FORMATS)}"
            )


PRECISIONS = {
    "fp8": Precision(),
    "fp8-bf16-attention": Precision(kv="bfloat16", attention_math="bfloat16"),
    "bf16": Precision("bfloat16", "bfloat16", "bfloat16", "bfloat16", wire="exact"),
    "mxfp4": Precision(ffn_weights="mxfp4"),
}
"""Named choices: full FP8 (Step-3 section 4.1), FP8 with BF16 attention (Table 8, 3A2F), all BF16,
and MXFP4 expert weights."""


def wire_bytes(precision: Precision, hidden: int, top_k: int) -> tuple[float, float]:
    """Bytes on the wire per row and FFN instance, without headers: (to the FFN, back).

    The protocol's own layout (afd/wire/layout.py). ``mxfp4`` with FP8 on the way back is what AMD's
    MoRI calls FP4 dispatch + FP8 combine: 11,200 bytes per round trip at hidden 7168, without ids
    and weights.

    Raises:
        ConfigError: the hidden size does not divide into the format's blocks.
    """
    to_ffn, back = layouts(precision.wire, precision.activations, 1, hidden, top_k)
    return float(to_ffn.message_bytes(1)), float(back.message_bytes(1))
