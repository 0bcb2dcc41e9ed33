"""Which parts of an attention half run as fused kernels (``attention.fused``). Imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afd.errors import ConfigError
from afd.wire.codecs import FP8_MAX
from afd.wire.layout import SCALE_BLOCK, Tag

CACHES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
"""Values of vLLM's kv_cache_dtype that the kernels write."""


@dataclass(frozen=True)
class Wanted:
    """What an attention instance asks for.

    fused: ``attention.fused``. tag: of the rows on the wire. hidden: of the model. ranks: of the
    instance. scales_measured: vLLM measures the scales of an FP8 KV cache while it serves.
    """

    fused: Literal["auto"] | bool
    tag: Tag
    hidden: int
    ranks: int
    scales_measured: bool


@dataclass(frozen=True)
class Facts:
    """A vLLM attention layer, as far as the kernels depend on it.

    backend: name of vLLM's attention backend. flash: it is FlashAttention, whose cache layout the
    kernels write, or derived from it. whole_heads: the rotary embedding turns whole heads, halves
    against halves, by a table of cosines and sines. cache: kv_cache_dtype. shared: the
    cache belongs to another layer.
    """

    backend: str
    flash: bool
    head_dim: int
    whole_heads: bool
    cache: str
    shared: bool


def why_not_attention(facts: Facts, wanted: Wanted) -> str | None:
    """Returns why norms, rotation and cache write cannot be one kernel; None: they can."""
    if not facts.flash:
        return f"vLLM's attention backend is {facts.backend}, not FLASH_ATTN"
    if not facts.whole_heads:
        return "the rotary embedding does not turn whole heads by a table"
    if facts.head_dim < 32 or facts.head_dim & (facts.head_dim - 1):
        return f"heads have {facts.head_dim} columns, not a power of two of at least 32"
    if facts.cache not in CACHES:
        return f"the KV cache is {facts.cache}"
    if wanted.scales_measured:
        return "vLLM measures the scales of the KV cache"
    return "layers share a KV cache" if facts.shared else None


def why_not_encoding(wanted: Wanted) -> str | None:
    """Returns why the norm cannot encode the rows for the wire; None: it can."""
    if wanted.tag not in FP8_MAX:
        return "the wire is not FP8"
    if wanted.hidden % SCALE_BLOCK:
        return f"hidden {wanted.hidden} is no multiple of {SCALE_BLOCK}"
    return "each rank encodes its share of the rows" if wanted.ranks > 1 else None


def chosen(fused: Literal["auto"] | bool, reason: str | None) -> bool:
    """Returns whether the attention kernels run.

    Raises:
        ConfigError: ``attention.fused`` is true, and there is a reason against it.
    """
    if fused is True and reason is not None:
        raise ConfigError(f"attention.fused is true, but {reason}; set it to auto")
    return fused is not False and reason is None
