"""Readers of the attention layers in a config.json. Each returns one entry per layer."""

from afd.errors import ConfigError
from afd.models.fields import Config, architecture, integer
from afd_planner.facts.attention import Attention, GroupedQuery, Latent, Recurrent


def _gqa(
    config: Config, window: int = 0, *, chunked: bool = False, output_gate: bool = False
) -> GroupedQuery:
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    merged = {**config, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return GroupedQuery(
        hidden=hidden,
        heads=heads,
        kv_heads=integer(merged, "num_key_value_heads"),
        head_dim=integer(merged, "head_dim"),
        window=window,
        chunked=chunked,
        output_gate=output_gate,
    )


def grouped(config: Config, layers: int) -> tuple[Attention, ...]:
    """GQA in every layer, with a sliding window in the layers for which the config sets one."""
    if config.get("layer_types"):
        return layer_types(config, layers)
    window = 0
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        window = integer(config, "sliding_window")
    full = _gqa(config)
    slide = _gqa(config, window)
    # Qwen2: this layer and all later ones have a sliding window.
    first = integer({"max_window_layers": 0, **config}, "max_window_layers", minimum=0)
    return tuple(slide if window and layer >= first else full for layer in range(layers))


def layer_types(config: Config, layers: int) -> tuple[Attention, ...]:
    """GQA with full, sliding or chunked attention per layer, as `layer_types` (Transformers) says.

    Older files have sliding_window_pattern = n instead: every n-th layer attends to everything.
    """
    kinds = _kinds(config, layers)
    known: dict[str, Attention] = {"full_attention": _gqa(config)}
    if "sliding_attention" in kinds:
        window = integer(config, "sliding_window")
        known["sliding_attention"] = _gqa(config, window)
    if "chunked_attention" in kinds:
        chunk = integer(config, "attention_chunk_size")
        known["chunked_attention"] = _gqa(config, chunk, chunked=True)
    return _choose(config, kinds, known)


def _kinds(config: Config, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        pattern = integer({"sliding_window_pattern": 1, **config}, "sliding_window_pattern")
        full, slide = "full_attention", "sliding_attention"
        return [slide if (layer + 1) % pattern else full for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(
            f"config.json of {architecture(config)}: layer_types must have {layers} entries"
        )
    return [str(kind) for kind in kinds]


def _choose(config: Config, kinds: list[str], known: dict[str, Attention]) -> tuple[Attention, ...]:
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ConfigError(
            f"config.json of {architecture(config)}: layer_types names {unknown[0]}, which the "
            f"planner cannot price; it supports {', '.join(sorted(known))}"
        )
    return tuple(known[kind] for kind in kinds)


def alternating(config: Config, layers: int) -> tuple[Attention, ...]:
    """Gemma 2: every second layer attends to the whole context."""
    return layer_types({"sliding_window_pattern": 2, **config}, layers)


def delta_net(config: Config, layers: int) -> tuple[Attention, ...]:
    """Qwen3-Next: gated delta nets, with gated GQA in every full_attention_interval-th layer."""
    interval = integer({"full_attention_interval": 4, **config}, "full_attention_interval")
    default = [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(layers)
    ]
    kinds = _kinds({"layer_types": default, **config}, layers)
    keys = integer(config, "linear_num_key_heads") * integer(config, "linear_key_head_dim")
    heads, value_dim = (
        integer(config, "linear_num_value_heads"),
        integer(config, "linear_value_head_dim"),
    )
    linear = Recurrent(
        hidden=integer(config, "hidden_size"),
        heads=heads,
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=value_dim,
        # queries, keys; values, output gate; decay and update strength per head
        input_width=2 * keys + 2 * heads * value_dim + 2 * heads,
        flops_per_state=7,
    )
    full = _gqa(config, output_gate=True)
    known: dict[str, Attention] = {"linear_attention": linear, "full_attention": full}
    return _choose(config, kinds, known)


def latent(config: Config, layers: int) -> tuple[Attention, ...]:
    """MLA in every layer."""
    core = Latent(
        hidden=integer(config, "hidden_size"),
        heads=integer(config, "num_attention_heads"),
        rank=integer(config, "kv_lora_rank"),
        rope_dim=integer(config, "qk_rope_head_dim"),
        nope_dim=integer(config, "qk_nope_head_dim"),
        head_value_dim=integer(config, "v_head_dim"),
        query_rank=integer(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
    )
    return (core,) * layers


def mfa(config: Config, layers: int) -> tuple[Attention, ...]:
    """Multi-matrix factorization attention in every layer (vLLM models/step3_text.py)."""
    core = GroupedQuery(
        hidden=integer(config, "hidden_size"),
        heads=integer(config, "num_attention_heads"),
        kv_heads=integer({"num_attention_groups": 1, **config}, "num_attention_groups"),
        head_dim=integer(config, "head_dim"),
        query_rank=integer(config, "share_q_dim"),
    )
    return (core,) * layers


def llama4(config: Config, layers: int) -> tuple[Attention, ...]:
    """Llama 4: chunked attention with RoPE; every fourth layer is full attention without RoPE."""
    if config.get("layer_types"):
        return layer_types(config, layers)
    chunk = integer(config, "attention_chunk_size")
    rope = config.get("no_rope_layers") or [(i + 1) % 4 for i in range(layers)]
    if not isinstance(rope, list) or len(rope) != layers:
        raise ConfigError(
            f"config.json of {architecture(config)}: no_rope_layers must have {layers} entries"
        )
    full, chunked = _gqa(config), _gqa(config, chunk, chunked=True)
    return tuple(chunked if uses_rope else full for uses_rope in rope)


def minimax(config: Config, layers: int) -> tuple[Attention, ...]:
    """MiniMax-Text-01 and M1: attn_type_list has 0 for lightning attention and 1 for GQA."""
    kinds = config.get("attn_type_list")
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {0, 1}:
        raise ConfigError(
            f"config.json of {architecture(config)}: attn_type_list must list 0 or 1 for each of "
            f"{layers} layers"
        )
    heads, head_dim = integer(config, "num_attention_heads"), integer(config, "head_dim")
    linear = Recurrent(
        hidden=integer(config, "hidden_size"),
        heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        input_width=4 * heads * head_dim,  # queries, keys, values, output gate
    )
    full = _gqa(config)
    return tuple(full if kind else linear for kind in kinds)
