"""openai/gpt-oss: attention sinks, biases everywhere, experts of a layer in stacked tensors.

Names, dtypes and keys: config.json of openai/gpt-oss-20b, the loader of vLLM 0.26 (models/
gpt_oss.py) and Transformers 5 (models/gpt_oss). Unquantised here; :mod:`.quantised` makes MXFP4.
"""

from afd_demo.sizes import Sizes
from afd_demo.weights import Config, Sink, attention, common_config, frame


def gpt_oss(w: Sink, s: Sizes, dtype: str) -> Config:
    """openai/gpt-oss-20b."""
    frame(w, s)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention(w, s, f"{layer}self_attn.", bias="qkvo")
        w.bias(f"{layer}self_attn.sinks", s.heads)
        w.router(f"{layer}mlp.router.weight", s.experts, s.hidden)
        w.bias(f"{layer}mlp.router.bias", s.experts)
        experts = f"{layer}mlp.experts."
        w.projection(f"{experts}gate_up_proj", s.experts, s.hidden, 2 * s.intermediate)
        w.bias(f"{experts}gate_up_proj_bias", s.experts, 2 * s.intermediate)
        w.projection(f"{experts}down_proj", s.experts, s.intermediate, s.hidden)
        w.bias(f"{experts}down_proj_bias", s.experts, s.hidden)
    kinds = ("sliding_attention", "full_attention")
    return common_config(s, dtype) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.intermediate,
        "num_local_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "experts_per_token": s.top_k,
        "swiglu_limit": 7.0,
        "layer_types": [kinds[i % 2] for i in range(s.layers)],
        "sliding_window": 16,
        "initial_context_length": s.max_positions // 32,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": s.max_positions // 32,
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
    }
