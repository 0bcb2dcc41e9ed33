"""Random weights and config.json of one small checkpoint per family.

Tensor names and shapes follow what vLLM 0.26 loads for each architecture. The scales are chosen so
that greedy decoding wanders instead of repeating one token: wide embeddings, router logits far
enough apart to be stable in bfloat16, projections of a few hundredths.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from afd.demo.sizes import Sizes

Tensors = dict[str, np.ndarray]
Checkpoint = tuple[dict[str, object], Tensors]

NUMPY_DTYPES: dict[str, type] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
_EMBEDDING_STD, _ROUTER_STD, _PROJECTION_STD, _NORM_STD = 0.5, 0.3, 0.08, 0.1
_REFERENCE_HIDDEN = 256  # the width that _PROJECTION_STD was chosen at


class _Weights:
    """Collects named random tensors; the order of calls fixes the stream of random numbers."""

    def __init__(self, seed: int, hidden: int, dtype: str) -> None:
        self.tensors: Tensors = {}
        self._random = np.random.default_rng(seed)
        self._dtype = NUMPY_DTYPES[dtype]
        # Wider layers sum more terms; keep the size of their output.
        self._projection_std = _PROJECTION_STD * (_REFERENCE_HIDDEN / hidden) ** 0.5
        self._router_std = _ROUTER_STD * (_REFERENCE_HIDDEN / hidden) ** 0.5

    def _draw(self, shape: tuple[int, ...], std: float) -> np.ndarray:
        return self._random.standard_normal(shape, dtype=np.float32) * np.float32(std)

    def projection(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._draw(shape, self._projection_std).astype(self._dtype)

    def router(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._draw(shape, self._router_std).astype(self._dtype)

    def embedding(self, name: str, *shape: int) -> None:
        self.tensors[name] = self._draw(shape, _EMBEDDING_STD).astype(self._dtype)

    def norm(self, name: str, size: int) -> None:
        self.tensors[name] = (1 + self._draw((size,), _NORM_STD)).astype(self._dtype)

    def router_bias(self, name: str, size: int) -> None:
        self.tensors[name] = self._draw((size,), _NORM_STD)  # float32 in every checkpoint

    def mlp(self, prefix: str, hidden: int, width: int) -> None:
        self.projection(f"{prefix}gate_proj.weight", width, hidden)
        self.projection(f"{prefix}up_proj.weight", width, hidden)
        self.projection(f"{prefix}down_proj.weight", hidden, width)

    def frame(self, s: Sizes) -> None:
        """What every family has outside of attention and FFN."""
        self.embedding("model.embed_tokens.weight", s.vocab, s.hidden)
        self.norm("model.norm.weight", s.hidden)
        self.projection("lm_head.weight", s.vocab, s.hidden)
        for i in range(s.layers):
            self.norm(f"model.layers.{i}.input_layernorm.weight", s.hidden)
            self.norm(f"model.layers.{i}.post_attention_layernorm.weight", s.hidden)


def _common_config(s: Sizes, dtype: str) -> dict[str, object]:
    return {
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "intermediate_size": s.dense_intermediate,
        "moe_intermediate_size": s.intermediate,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "vocab_size": s.vocab,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def qwen3_moe(s: Sizes, seed: int, dtype: str) -> Checkpoint:
    w = _Weights(seed, s.hidden, dtype)
    w.frame(s)
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
            w.mlp(f"{layer}mlp.experts.{e}.", s.hidden, s.intermediate)
    config = _common_config(s, dtype) | {
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
    return config, w.tensors


def _deepseek(s: Sizes, seed: int, dtype: str, *, v3: bool) -> Checkpoint:
    nope, rope, value, kv_rank, q_rank = 32, 16, 32, 64, 96
    w = _Weights(seed, s.hidden, dtype)
    w.frame(s)
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
        if i == 0:
            w.mlp(f"{layer}mlp.", s.hidden, s.dense_intermediate)
            continue
        w.router(f"{layer}mlp.gate.weight", s.experts, s.hidden)
        if v3:
            w.router_bias(f"{layer}mlp.gate.e_score_correction_bias", s.experts)
        for e in range(s.experts):
            w.mlp(f"{layer}mlp.experts.{e}.", s.hidden, s.intermediate)
        w.mlp(f"{layer}mlp.shared_experts.", s.hidden, s.intermediate)
    config = _common_config(s, dtype) | {
        "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if v3 else "deepseek_v2",
        "num_key_value_heads": s.heads,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": s.top_k,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": v3,
        "routed_scaling_factor": 2.5 if v3 else 1.0,
        "scoring_func": "sigmoid" if v3 else "softmax",
        "topk_method": "noaux_tc" if v3 else "greedy",
        "n_group": 2 if v3 else 1,
        "topk_group": 1,
        "q_lora_rank": q_rank if v3 else None,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "rms_norm_eps": 1e-6,
    }
    return config, w.tensors


def deepseek_v2(s: Sizes, seed: int, dtype: str) -> Checkpoint:
    return _deepseek(s, seed, dtype, v3=False)


def deepseek_v3(s: Sizes, seed: int, dtype: str) -> Checkpoint:
    return _deepseek(s, seed, dtype, v3=True)


def step3(s: Sizes, seed: int, dtype: str) -> Checkpoint:
    q_dim = s.hidden // 2
    moe_layers = range(1, s.layers - s.dense_last)
    w = _Weights(seed, s.hidden, dtype)
    w.frame(s)
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
            w.mlp(f"{layer}mlp.", s.hidden, s.dense_intermediate)
            continue
        w.router(f"{layer}moe.gate.weight", s.experts, s.hidden)
        w.projection(f"{layer}moe.gate_proj.weight", s.experts, s.intermediate, s.hidden)
        w.projection(f"{layer}moe.up_proj.weight", s.experts, s.intermediate, s.hidden)
        w.projection(f"{layer}moe.down_proj.weight", s.experts, s.hidden, s.intermediate)
        w.mlp(f"{layer}share_expert.", s.hidden, s.intermediate)
    config = _common_config(s, dtype) | {
        "architectures": ["Step3TextForCausalLM"],
        "model_type": "step3_text",
        "num_attention_groups": 1,
        "max_seq_len": 4096,
        "max_position_embedding": 4096,
        "rms_norm_eps": 1e-5,
        "moe_num_experts": s.experts,
        "moe_top_k": s.top_k,
        "moe_layers_enum": ",".join(map(str, moe_layers)),
        "norm_expert_weight": False,
        "share_expert_dim": s.intermediate,
        "share_q_dim": q_dim,
        "head_dim": s.head_dim,
    }
    return config, w.tensors


MAKERS: dict[str, Callable[[Sizes, int, str], Checkpoint]] = {
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "step3": step3,
}
