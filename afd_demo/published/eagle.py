"""A tiny random EAGLE or EAGLE-3 head for a checkpoint of :mod:`.make`.

Keys and names: config.json and weights of yuhuili/EAGLE-LLaMA3-Instruct-8B and
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B. Neither has an embedding here: it is the target's.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from afd_demo.published.make import FIRST_LIKELY, write
from afd_demo.sizes import Sizes
from afd_demo.weights import Drawn, attention, common_config, mlp

_DRAFT_VOCAB = 32


def make_eagle(
    method: Literal["eagle", "eagle3"],
    directory: Path,
    sizes: Sizes,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    likely: int = 4,
) -> None:
    """Writes a head of one layer to ``directory``; creates it.

    Args:
        sizes: of the target, which has four layers or more.
        likely: as in :func:`.make.make_published`, of the target: EAGLE-3 has a head of its own.
    """
    s, w = sizes, Drawn(seed + 1, sizes.hidden, dtype)
    config = common_config(s, dtype) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "rms_norm_eps": 1e-6,
    }
    w.norm("layers.0.post_attention_layernorm.weight", s.hidden)
    mlp(w, "layers.0.mlp.", s.hidden, s.dense_intermediate)
    if method == "eagle":
        attention(w, s, "layers.0.self_attn.")
        w.projection("fc.weight", s.hidden, 2 * s.hidden)
        write(directory, config, w.tensors, s.vocab)
        return
    layer = "layers.0.self_attn."
    w.projection(f"{layer}q_proj.weight", s.heads * s.head_dim, 2 * s.hidden)
    for name in ("k_proj", "v_proj"):
        w.projection(f"{layer}{name}.weight", s.kv_heads * s.head_dim, 2 * s.hidden)
    w.projection(f"{layer}o_proj.weight", s.hidden, s.heads * s.head_dim)
    for name in ("layers.0.hidden_norm", "layers.0.input_layernorm", "norm"):
        w.norm(f"{name}.weight", s.hidden)
    w.projection("fc.weight", s.hidden, 3 * s.hidden)
    w.projection("lm_head.weight", _DRAFT_VOCAB, s.hidden)
    head = w.tensors["lm_head.weight"]
    head[:likely] *= head.dtype.type(6)
    # Draft token i is token i + d2t[i] of the target.
    w.tensors["d2t"] = np.full(_DRAFT_VOCAB, FIRST_LIKELY, dtype=np.int64)
    config |= {
        "draft_vocab_size": _DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, s.layers - 1],
    }
    write(directory, config, w.tensors, s.vocab)
