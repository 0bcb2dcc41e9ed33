"""Qwen3-Next: three layers of gated linear attention, then one of full attention; a draft layer.

Names, dtypes and keys: config.json of Qwen/Qwen3-Next-80B-A3B-Instruct, the loader of vLLM 0.26
(models/qwen3_next.py) and Transformers 5 (models/qwen3_next).
"""

from afd_demo.sizes import Sizes
from afd_demo.weights import Config, Sink, common_config, mlp

_EVERY = 4  # a layer of full attention


def qwen3_next(w: Sink, s: Sizes, dtype: str) -> Config:
    """Qwen/Qwen3-Next-80B-A3B-Instruct. Its norms hold the difference from 1."""
    key_heads, value_heads, size, kernel = 2, 4, s.linear_head, 4
    w.embedding("model.embed_tokens.weight", s.vocab, s.hidden)
    w.bias("model.norm.weight", s.hidden)
    w.projection("lm_head.weight", s.vocab, s.hidden)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        w.bias(f"{layer}input_layernorm.weight", s.hidden)
        w.bias(f"{layer}post_attention_layernorm.weight", s.hidden)
        if (i + 1) % _EVERY:
            keys, values = key_heads * size, value_heads * size
            linear = f"{layer}linear_attn."
            w.projection(f"{linear}in_proj_qkvz.weight", 2 * keys + 2 * values, s.hidden)
            w.projection(f"{linear}in_proj_ba.weight", 2 * value_heads, s.hidden)
            w.projection(f"{linear}conv1d.weight", 2 * keys + values, 1, kernel)
            w.bias(f"{linear}dt_bias", value_heads)
            w.bias(f"{linear}A_log", value_heads)
            w.norm(f"{linear}norm.weight", size)
            w.projection(f"{linear}out_proj.weight", s.hidden, values)
        else:
            _full_attention(w, s, f"{layer}self_attn.")
        _experts(w, s, f"{layer}mlp.")
    _draft_layer(w, s)
    return common_config(s, dtype) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "num_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "shared_expert_intermediate_size": s.shared_experts * s.intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "full_attention_interval": _EVERY,
        "linear_conv_kernel_dim": kernel,
        "linear_key_head_dim": size,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": size,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
    }


def _full_attention(w: Sink, s: Sizes, full: str) -> None:
    w.projection(f"{full}q_proj.weight", 2 * s.heads * s.head_dim, s.hidden)
    w.projection(f"{full}k_proj.weight", s.kv_heads * s.head_dim, s.hidden)
    w.projection(f"{full}v_proj.weight", s.kv_heads * s.head_dim, s.hidden)
    w.projection(f"{full}o_proj.weight", s.hidden, s.heads * s.head_dim)
    w.bias(f"{full}q_norm.weight", s.head_dim)
    w.bias(f"{full}k_norm.weight", s.head_dim)


def _experts(w: Sink, s: Sizes, block: str) -> None:
    w.router(f"{block}gate.weight", s.experts, s.hidden)
    for e in range(s.experts):
        mlp(w, f"{block}experts.{e}.", s.hidden, s.intermediate)
    mlp(w, f"{block}shared_expert.", s.hidden, s.shared_experts * s.intermediate)
    w.router(f"{block}shared_expert_gate.weight", 1, s.hidden)


def _draft_layer(w: Sink, s: Sizes) -> None:
    """One layer (MTP), which config.json does not mention."""
    layer = "mtp.layers.0."
    for name in ("input_layernorm", "post_attention_layernorm"):
        w.bias(f"{layer}{name}.weight", s.hidden)
    _full_attention(w, s, f"{layer}self_attn.")
    _experts(w, s, f"{layer}mlp.")
    w.projection("mtp.fc.weight", s.hidden, 2 * s.hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        w.bias(f"mtp.{name}.weight", s.hidden)
