"""Families with grouped-query attention and per-expert tensors.

Names, dtypes and keys: config.json of the checkpoint that each function names, the loaders of
vLLM 0.26 (model_executor/models) and the modules of Transformers 5 (models/*/modeling_*.py).
"""

from afd_demo.sizes import Sizes
from afd_demo.weights import Config, Sink, attention, common_config, frame, mlp


def mixtral(w: Sink, s: Sizes, dtype: str) -> Config:
    """mistralai/Mixtral-8x7B-Instruct-v0.1."""
    frame(w, s)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention(w, s, f"{layer}self_attn.")
        _w123(w, s, f"{layer}block_sparse_moe.")
    return _config(s, dtype, "MixtralForCausalLM", "mixtral") | {
        "intermediate_size": s.intermediate,
        "num_local_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "output_router_logits": False,
    }


def minimax_m2(w: Sink, s: Sizes, dtype: str) -> Config:
    """MiniMaxAI/MiniMax-M2: norms over all heads, a partial rotary embedding, a routing bias."""
    frame(w, s)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention(w, s, f"{layer}self_attn.")
        w.norm(f"{layer}self_attn.q_norm.weight", s.heads * s.head_dim)
        w.norm(f"{layer}self_attn.k_norm.weight", s.kv_heads * s.head_dim)
        _w123(w, s, f"{layer}block_sparse_moe.")
        w.router_bias(f"{layer}block_sparse_moe.e_score_correction_bias", s.experts)
    return _config(s, dtype, "MiniMaxM2ForCausalLM", "minimax_m2") | {
        "intermediate_size": s.intermediate,
        "num_local_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rotary_dim": s.head_dim // 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


def qwen2_moe(w: Sink, s: Sizes, dtype: str) -> Config:
    """Qwen/Qwen1.5-MoE-A2.7B-Chat: biases in attention, a shared expert behind a sigmoid gate."""
    frame(w, s)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention(w, s, f"{layer}self_attn.", bias="qkv")
        _experts(w, s, f"{layer}mlp.")
        mlp(w, f"{layer}mlp.shared_expert.", s.hidden, s.shared_experts * s.intermediate)
        w.router(f"{layer}mlp.shared_expert_gate.weight", 1, s.hidden)
    return _config(s, dtype, "Qwen2MoeForCausalLM", "qwen2_moe") | {
        "num_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "shared_expert_intermediate_size": s.shared_experts * s.intermediate,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    }


def qwen3_moe(w: Sink, s: Sizes, dtype: str) -> Config:
    """Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B."""
    frame(w, s)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention(w, s, f"{layer}self_attn.")
        w.norm(f"{layer}self_attn.q_norm.weight", s.head_dim)
        w.norm(f"{layer}self_attn.k_norm.weight", s.head_dim)
        _experts(w, s, f"{layer}mlp.")
    return _config(s, dtype, "Qwen3MoeForCausalLM", "qwen3_moe") | {
        "num_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    }


def glm4_moe(w: Sink, s: Sizes, dtype: str) -> Config:
    """zai-org/GLM-4.5 and GLM-4.6: dense first layers, biases and norms in attention.

    The published checkpoints have one layer for speculative decoding behind the last one.
    """
    frame(w, s)
    for i in range(s.layers + 1):
        layer = f"model.layers.{i}."
        attention(w, s, f"{layer}self_attn.", bias="qkv")
        w.norm(f"{layer}self_attn.q_norm.weight", s.head_dim)
        w.norm(f"{layer}self_attn.k_norm.weight", s.head_dim)
        if i < s.dense_first:
            mlp(w, f"{layer}mlp.", s.hidden, s.dense_intermediate)
            continue
        _experts(w, s, f"{layer}mlp.")
        w.router_bias(f"{layer}mlp.gate.e_score_correction_bias", s.experts)
        mlp(w, f"{layer}mlp.shared_experts.", s.hidden, s.shared_experts * s.intermediate)
    draft = f"model.layers.{s.layers}."
    for name in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm"):
        w.norm(f"{draft}{name}.weight", s.hidden)
    w.norm(f"{draft}shared_head.norm.weight", s.hidden)
    w.projection(f"{draft}eh_proj.weight", s.hidden, 2 * s.hidden)
    return _config(s, dtype, "Glm4MoeForCausalLM", "glm4_moe") | {
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": s.experts,
        "n_shared_experts": s.shared_experts,
        "num_experts_per_tok": s.top_k,
        "first_k_dense_replace": s.dense_first,
        "num_nextn_predict_layers": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-5,
    }


def ernie45_moe(w: Sink, s: Sizes, dtype: str) -> Config:
    """baidu/ERNIE-4.5-21B-A3B-PT: a float32 router, tied embeddings."""
    frame(w, s, tied=True)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention(w, s, f"{layer}self_attn.")
        if i < s.dense_first:
            mlp(w, f"{layer}mlp.", s.hidden, s.dense_intermediate)
            continue
        _experts(w, s, f"{layer}mlp.")
        w.router_bias(f"{layer}mlp.moe_statics.e_score_correction_bias", 1, s.experts)
        mlp(w, f"{layer}mlp.shared_experts.", s.hidden, s.shared_experts * s.intermediate)
    return _config(s, dtype, "Ernie4_5_MoeForCausalLM", "ernie4_5_moe") | {
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_num_experts": s.experts,
        "moe_k": s.top_k,
        "moe_num_shared_experts": s.shared_experts,
        "moe_layer_start_index": s.dense_first,
        "moe_layer_end_index": s.layers - 1,
        "moe_layer_interval": 1,
        "moe_use_aux_free": True,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    }


def _config(s: Sizes, dtype: str, architecture: str, model_type: str) -> Config:
    return common_config(s, dtype) | {
        "architectures": [architecture],
        "model_type": model_type,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
    }


def _experts(w: Sink, s: Sizes, prefix: str) -> None:
    w.router(f"{prefix}gate.weight", s.experts, s.hidden)
    for e in range(s.experts):
        mlp(w, f"{prefix}experts.{e}.", s.hidden, s.intermediate)


def _w123(w: Sink, s: Sizes, prefix: str) -> None:
    """Experts as Mixtral names them: w1 is the gate, w3 up, w2 down."""
    w.router(f"{prefix}gate.weight", s.experts, s.hidden)
    for e in range(s.experts):
        w.projection(f"{prefix}experts.{e}.w1.weight", s.intermediate, s.hidden)
        w.projection(f"{prefix}experts.{e}.w2.weight", s.hidden, s.intermediate)
        w.projection(f"{prefix}experts.{e}.w3.weight", s.intermediate, s.hidden)
