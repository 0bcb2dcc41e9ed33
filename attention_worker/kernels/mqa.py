"""When our decode kernel computes attention. Pure: imports neither vLLM nor torch."""

from typing import Protocol

HEAD_SIZES = (64, 128, 256)
CACHE_TYPES = ("fp8", "fp8_e4m3")


def refusal(cache_type: str, kv_heads: int, head_size: int) -> str | None:
    """Returns why ``attention.kernel: mqa`` cannot serve a model, and the remedy; else None."""
    if cache_type not in CACHE_TYPES:
        return (
            f"attention.kernel mqa reads an FP8 cache, not {cache_type}; add --kv-cache-dtype=fp8"
            " to attention.vllm_args, or set attention.kernel: vllm"
        )
    if kv_heads != 1:
        return (
            f"attention.kernel mqa is for models with one key/value head, this one has {kv_heads};"
            " set attention.kernel: vllm"
        )
    if head_size not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        return (
            f"attention.kernel mqa supports head sizes {known}, this model has {head_size};"
            " set attention.kernel: vllm"
        )
    return None


class Layer(Protocol):
    """Attributes of vLLM's FlashAttentionImpl that describe its layer."""

    attn_type: str
    sliding_window: tuple[int, int]
    alibi_slopes: object | None
    logits_soft_cap: float
    sinks: object | None
    dcp_world_size: int
    batch_invariant_enabled: bool


def is_plain(layer: Layer) -> bool:
    """Returns whether the layer is plain attention over its whole cache."""
    return (
        layer.attn_type == "decoder"
        and layer.sliding_window == (-1, -1)
        and layer.alibi_slopes is None
        and not layer.logits_soft_cap
        and layer.sinks is None
        and layer.dcp_world_size == 1
        and not layer.batch_invariant_enabled
    )


class Batch(Protocol):
    """Attributes of vLLM's FlashAttentionMetadata that describe a step."""

    max_query_len: int
    use_cascade: bool
    causal: object
    mm_prefix_range_tensor: object | None
    rswa_prefix_lens: object | None


def is_decode(batch: Batch) -> bool:
    """Returns whether every request has one token, which attends to its whole cache."""
    return (
        batch.max_query_len == 1
        and not batch.use_cascade
        and batch.causal is True
        and batch.mm_prefix_range_tensor is None
        and batch.rswa_prefix_lens is None
    )
