"""Checkpoints with DeepSeek-V3's layers under other names: Kimi K2.

Keys: config.json of moonshotai/Kimi-K2-Instruct.
"""

from afd.demo.sizes import Sizes
from afd.demo.weights import Config, Sink, deepseek_v3


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
