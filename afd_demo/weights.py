"""Random weights and config.json of one small checkpoint per family.

Tensor names and shapes are those that vLLM 0.26 loads for each architecture. The scales keep greedy
decoding from repeating one token: wide embeddings, router logits far enough apart to be stable in
bfloat16, and projections of a few hundredths.
"""

from collections.abc import Callable
from typing import Protocol

import ml_dtypes
import numpy as np

from afd_demo.sizes import Sizes

Tensors = dict[str, np.ndarray]
Config = dict[str, object]

NUMPY_DTYPES: dict[str, type] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
_EMBEDDING_STD, _ROUTER_STD, _PROJECTION_STD, _NORM_STD = 0.5, 0.3, 0.08, 0.1
_REFERENCE_HIDDEN = 256  # the hidden size for which _PROJECTION_STD was chosen


class Sink(Protocol):
    """Receives the tensors of a checkpoint one by one, in order."""

    def projection(self, name: str, *shape: int) -> None: ...

    def router(self, name: str, *shape: int) -> None: ...

    def embedding(self, name: str, *shape: int) -> None: ...

    def norm(self, name: str, size: int) -> None: ...

    def bias(self, name: str, *shape: int) -> None: ...

    def router_bias(self, name: str, *shape: int) -> None:
        """float32 in every checkpoint."""


def deviations(hidden: int) -> dict[str, float]:
    """Returns the standard deviation of each kind of tensor in a Sink. Norms have mean 1."""
    # Wider layers sum more terms: scale the weights down to keep the output's size.
    scale = (_REFERENCE_HIDDEN / hidden) ** 0.5
    return {
        "projection": _PROJECTION_STD * scale,
        "router": _ROUTER_STD * scale,
        "embedding": _EMBEDDING_STD,
        "norm": _NORM_STD,
        "bias": _NORM_STD,
        "router_bias": _NORM_STD,
    }


class Drawn:
    """Random tensors in memory. The order of calls determines the random numbers."""

    def __init__(self, seed: int, hidden: int, dtype: str) -> None:
        self.tensors: Tensors = {}
        self._random = np.random.default_rng(seed)
        self._dtype = NUMPY_DTYPES[dtype]
        self._std = deviations(hidden)

    def _draw(self, shape: tuple[int, ...], kind: str) -> np.ndarray:
        drawn: np.ndarray = self._random.standard_normal(shape, dtype=np.float32)
        drawn *= np.float32(self._std[kind])
        return drawn

    def projection(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._draw(shape, "projection").astype(self._dtype)

    def router(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._draw(shape, "router").astype(self._dtype)

    def embedding(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._draw(shape, "embedding").astype(self._dtype)

    def norm(self, name: str, size: int) -> None:
        self.tensors[name] = (1 + self._draw((size,), "norm")).astype(self._dtype)

    def bias(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._draw(shape, "bias").astype(self._dtype)

    def router_bias(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._draw(shape, "router_bias")


def mlp(w: Sink, prefix: str, hidden: int, width: int) -> None:
    """A gated MLP."""
    w.projection(f"{prefix}gate_proj.weight", width, hidden)
    w.projection(f"{prefix}up_proj.weight", width, hidden)
    w.projection(f"{prefix}down_proj.weight", hidden, width)


def frame(w: Sink, s: Sizes, prefix: str = "", *, tied: bool = False) -> None:
    """The tensors outside attention and FFN, which every family has.

    prefix: of all names. tied: there is no lm_head; the embedding is used.
    """
    w.embedding(f"{prefix}model.embed_tokens.weight", s.vocab, s.hidden)
    w.norm(f"{prefix}model.norm.weight", s.hidden)
    if not tied:
        w.projection(f"{prefix}lm_head.weight", s.vocab, s.hidden)
    for i in range(s.layers):
        w.norm(f"{prefix}model.layers.{i}.input_layernorm.weight", s.hidden)
        w.norm(f"{prefix}model.layers.{i}.post_attention_layernorm.weight", s.hidden)


def attention(w: Sink, s: Sizes, prefix: str, *, bias: str = "") -> None:
    """Grouped-query attention. bias: the letters of the projections that have one, of "qkvo"."""
    rows = {"q": s.heads * s.head_dim, "k": s.kv_heads * s.head_dim, "v": s.kv_heads * s.head_dim}
    for letter, size in rows.items():
        w.projection(f"{prefix}{letter}_proj.weight", size, s.hidden)
        if letter in bias:
            w.bias(f"{prefix}{letter}_proj.bias", size)
    w.projection(f"{prefix}o_proj.weight", s.hidden, s.heads * s.head_dim)
    if "o" in bias:
        w.bias(f"{prefix}o_proj.bias", s.hidden)


def common_config(s: Sizes, dtype: str) -> dict[str, object]:
    """The keys of config.json that most families have."""
    return {
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "intermediate_size": s.dense_intermediate,
        "moe_intermediate_size": s.intermediate,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "max_position_embeddings": s.max_positions,
        "vocab_size": s.vocab,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def qwen3_moe(w: Sink, s: Sizes, dtype: str) -> Config:
    frame(w, s)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention = f"{layer}self_attn."
        w.projection(f"{attention}q_proj.weight", s.heads * s.head_dim, s.hidden)
        w.projection(f"{attention}k_proj.weight", s.kv_heads * s.head_dim, s.hidden)
        w.projection(f"{attention}v_proj.weight", s.kv_heads * s.head_dim, s.hidden)
        w.projection(f"{attention}o_proj.weight", s.hidden, s.heads * s.head_dim)
        w.norm(f"{attention}q_norm.weight", s.head_dim)
        w.norm(f"{attention}k_norm.weight", s.head_dim)
        w.router(f"{layer}mlp.gate.weight", s.experts, s.hidden)
        for e in range(s.experts):
            mlp(w, f"{layer}mlp.experts.{e}.", s.hidden, s.intermediate)
    return common_config(s, dtype) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "num_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    }


def _deepseek(w: Sink, s: Sizes, dtype: str, *, v3: bool) -> Config:
    nope, rope, value, kv_rank, q_rank = s.mla
    frame(w, s)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention = f"{layer}self_attn."
        if v3:
            w.projection(f"{attention}q_a_proj.weight", q_rank, s.hidden)
            w.norm(f"{attention}q_a_layernorm.weight", q_rank)
            w.projection(f"{attention}q_b_proj.weight", s.heads * (nope + rope), q_rank)
        else:
            w.projection(f"{attention}q_proj.weight", s.heads * (nope + rope), s.hidden)
        w.projection(f"{attention}kv_a_proj_with_mqa.weight", kv_rank + rope, s.hidden)
        w.norm(f"{attention}kv_a_layernorm.weight", kv_rank)
        w.projection(f"{attention}kv_b_proj.weight", s.heads * (nope + value), kv_rank)
        w.projection(f"{attention}o_proj.weight", s.hidden, s.heads * value)
        if i < s.dense_first:
            mlp(w, f"{layer}mlp.", s.hidden, s.dense_intermediate)
            continue
        w.router(f"{layer}mlp.gate.weight", s.experts, s.hidden)
        if v3:
            w.router_bias(f"{layer}mlp.gate.e_score_correction_bias", s.experts)
        for e in range(s.experts):
            mlp(w, f"{layer}mlp.experts.{e}.", s.hidden, s.intermediate)
        mlp(w, f"{layer}mlp.shared_experts.", s.hidden, s.shared_experts * s.intermediate)
    return common_config(s, dtype) | {
        "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if v3 else "deepseek_v2",
        "num_key_value_heads": s.heads,
        "n_routed_experts": s.experts,
        "n_shared_experts": s.shared_experts,
        "num_experts_per_tok": s.top_k,
        "first_k_dense_replace": s.dense_first,
        "moe_layer_freq": 1,
        "norm_topk_prob": v3,
        "routed_scaling_factor": 2.5 if v3 else 1.0,
        "scoring_func": "sigmoid" if v3 else "softmax",
        "topk_method": "noaux_tc" if v3 else "greedy",
        "n_group": s.groups if v3 else 1,
        "topk_group": s.top_groups if v3 else 1,
        "q_lora_rank": q_rank if v3 else None,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "rms_norm_eps": 1e-6,
    }


def deepseek_v2(w: Sink, s: Sizes, dtype: str) -> Config:
    return _deepseek(w, s, dtype, v3=False)


def deepseek_v3(w: Sink, s: Sizes, dtype: str) -> Config:
    return _deepseek(w, s, dtype, v3=True)


def step3(w: Sink, s: Sizes, dtype: str) -> Config:
    q_dim = s.share_q_dim or s.hidden // 2
    moe_layers = range(1, s.layers - s.dense_last)
    frame(w, s)
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        attention = f"{layer}self_attn."
        w.projection(f"{attention}q_proj.weight", q_dim, s.hidden)
        w.projection(f"{attention}k_proj.weight", s.head_dim, s.hidden)
        w.projection(f"{attention}v_proj.weight", s.head_dim, s.hidden)
        w.norm(f"{attention}inter_norm.weight", q_dim)
        w.projection(f"{attention}wq.weight", s.heads * s.head_dim, q_dim)
        w.projection(f"{attention}o_proj.weight", s.hidden, s.heads * s.head_dim)
        if i not in moe_layers:
            mlp(w, f"{layer}mlp.", s.hidden, s.dense_intermediate)
            continue
        w.router(f"{layer}moe.gate.weight", s.experts, s.hidden)
        w.projection(f"{layer}moe.gate_proj.weight", s.experts, s.intermediate, s.hidden)
        w.projection(f"{layer}moe.up_proj.weight", s.experts, s.intermediate, s.hidden)
        w.projection(f"{layer}moe.down_proj.weight", s.experts, s.hidden, s.intermediate)
        mlp(w, f"{layer}share_expert.", s.hidden, s.intermediate)
    return common_config(s, dtype) | {
        "architectures": ["Step3TextForCausalLM"],
        "model_type": "step3_text",
        "num_attention_groups": 1,
        "max_seq_len": s.max_positions,
        "max_position_embedding": s.max_positions,
        "rms_norm_eps": 1e-5,
        "moe_num_experts": s.experts,
        "moe_top_k": s.top_k,
        "moe_layers_enum": ",".join(map(str, moe_layers)),
        "norm_expert_weight": False,
        "share_expert_dim": s.intermediate,
        "share_q_dim": q_dim,
        "head_dim": s.head_dim,
    }


MAKERS: dict[str, Callable[[Sink, Sizes, str], Config]] = {
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "step3": step3,
}
