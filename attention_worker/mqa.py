"""When attention is left to our decode kernel. No vLLM and no torch."""

from typing import Protocol

HEAD_SIZES = (64, 128, 256)
CACHE_TYPES = ("fp8", "fp8_e4m3")


def refusal(cache_type: str, kv_heads: int, head_size: int) -> str | None:
    """Why ``attention.kernel: mqa`` cannot be had for a model at all, and the remedy."""
    if cache_type not in CACHE_TYPES:
        return (
            f"attention.kernel mqa reads an FP8 cache, not {cache_type}; add --kv-cache-dtype=fp8"
            " to attention.vllm_args, or leave kernel at vllm"
        )
    if kv_heads != 1:
        return (
            f"attention.kernel mqa is for models with one key/value head, this one has {kv_heads};"
            " leave kernel at vllm"
        )
    if head_size not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        return (
            f"attention.kernel mqa is for heads of {known}, this model's are of {head_size};"
            " leave kernel at vllm"
        )
    return None


class Layer(Protocol):
    """What vLLM's FlashAttentionImpl says of its layer."""

    attn_type: str
    sliding_window: tuple[int, int]
    alibi_slopes: object | None
    logits_soft_cap: float
    sinks: object | None
    dcp_world_size: int
    batch_invariant_enabled: bool


def is_plain(layer: Layer) -> bool:
    """Whether the layer attends to all of its cache with nothing added."""
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
    """What vLLM's FlashAttentionMetadata says of a step."""

    max_query_len: int
    use_cascade: bool
    causal: object
    mm_prefix_range_tensor: object | None
    rswa_prefix_lens: object | None


def is_decode(batch: Batch) -> bool:
    """Whether every request brings one token that sees all of its cache."""
    return (
        batch.max_query_len == 1
        and not batch.use_cascade
        and batch.causal is True
        and batch.mm_prefix_range_tensor is None
        and batch.rswa_prefix_lens is None
    )
