"""Number formats: bytes per value, and which format each part of a deployment uses."""

from dataclasses import dataclass
from functools import cache

from afd.errors import ConfigError
from afd.wire.layout import SCALE_BLOCK, layouts

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "mxfp4": 17 / 32,  # per 32 values: 16 bytes and one scale byte (OCP MX v1.0)
}

WIRE_FORMATS = ("exact", "fp8", "mxfp4")
"""Wire formats that the planner can price: those of afd/wire/layout.py."""


def wire_formats(hidden: int) -> tuple[str, ...]:
    """Returns the wire formats for rows of ``hidden`` columns: without whole blocks, only exact."""
    return ("exact",) if hidden % SCALE_BLOCK else WIRE_FORMATS


def dtype_bytes(dtype: str) -> float:
    """Returns the bytes per value, with the block scales of mxfp4.

    Raises:
        ConfigError: The format is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"number format {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Precision:
    """Number formats of one deployment; names are keys of DTYPE_BYTES.

    Attributes:
        attention_weights: Projections before and after attention, and the router.
        ffn_weights: Dense and expert FFN weights.
        kv: KV cache.
        attention_math: Inputs of the attention core's matrix products.
        head: Embedding and LM head.
        activations: Hidden states; the wire format ``exact`` sends them as they are.
        wire: One of WIRE_FORMATS.
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
    "fp8": Precision(attention_weights="bfloat16"),
    "fp8-bf16-cache": Precision("bfloat16", "fp8", "bfloat16", "bfloat16"),
    "bf16": Precision("bfloat16", "bfloat16", "bfloat16", "bfloat16", wire="exact"),
    "mxfp4": Precision(attention_weights="bfloat16", ffn_weights="mxfp4"),
    "all-fp8": Precision(),
}
"""Choices of `--precision`. ``fp8``, ``fp8-bf16-cache``, ``bf16`` and ``mxfp4`` (FFN weights) are
what `afd serve` runs from a checkpoint with unquantised attention. ``all-fp8`` also has FP8
attention weights (Step-3 report section 4.1): a published FP8 checkpoint, whose attention vLLM
reads; that has not run on GPUs."""


@cache
def wire_bytes(precision: Precision, hidden: int, top_k: int) -> tuple[float, float]:
    """Returns the bytes per row and FFN instance, without headers: (request, answer).

    The sizes are those of the protocol (afd/wire/layout.py). ``mxfp4`` sends requests in MXFP4 and
    answers in FP8, as AMD's MoRI does (FP4 dispatch, FP8 combine): 11,200 bytes per round trip at a
    hidden size of 7168, without expert ids and weights.

    Raises:
        ConfigError: The hidden size is not a multiple of the format's block size.
    """
    to_ffn, back = layouts(precision.wire, precision.activations, 1, hidden, top_k)
    return float(to_ffn.message_bytes(1)), float(back.message_bytes(1))
