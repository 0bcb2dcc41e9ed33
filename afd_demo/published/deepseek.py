"""Checkpoints with DeepSeek-V3's layers: with a draft layer (MTP), Kimi K2, and DeepSeek-V3.2.

Keys and names: config.json of deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Instruct and
deepseek-ai/DeepSeek-V3.2-Exp, and class ``Indexer`` of vLLM 0.26 (models/deepseek_v2.py).
"""

from dataclasses import replace

from afd_demo.sizes import Sizes
from afd_demo.weights import Config, Sink, deepseek_v3


def deepseek_v3_mtp(w: Sink, s: Sizes, dtype: str) -> Config:
    """deepseek-ai/DeepSeek-V3: the draft layer follows the last decoder layer."""
    config = deepseek_v3(w, replace(s, layers=s.layers + 1), dtype)
    draft = f"model.layers.{s.layers}."
    w.embedding(f"{draft}embed_tokens.weight", s.vocab, s.hidden)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        w.norm(f"{draft}{name}.weight", s.hidden)
    w.projection(f"{draft}eh_proj.weight", s.hidden, 2 * s.hidden)
    w.projection(f"{draft}shared_head.head.weight", s.vocab, s.hidden)
    return config | {"num_hidden_layers": s.layers, "num_nextn_predict_layers": 1}


def kimi_k2(w: Sink, s: Sizes, dtype: str) -> Config:
    """moonshotai/Kimi-K2-Instruct: one group of experts."""
    return deepseek_v3(w, s, dtype) | {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "num_nextn_predict_layers": 0,
    }


def deepseek_v32(w: Sink, s: Sizes, dtype: str) -> Config:
    """deepseek-ai/DeepSeek-V3.2-Exp."""
    heads, size, q_rank = 4, 64, s.mla[4]
    config = deepseek_v3(w, s, dtype)
    for i in range(s.layers):
        indexer = f"model.layers.{i}.self_attn.indexer."
        w.projection(f"{indexer}wq_b.weight", heads * size, q_rank)
        w.projection(f"{indexer}wk.weight", size, s.hidden)
        w.norm(f"{indexer}k_norm.weight", size)
        w.bias(f"{indexer}k_norm.bias", size)
        w.projection(f"{indexer}weights_proj.weight", heads, s.hidden)
    return config | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_head_dim": size,
        "index_n_heads": heads,
        "index_topk": 128,
    }
