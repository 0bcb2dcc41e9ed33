"""Writes a trained model as a Hugging Face Qwen3-MoE checkpoint (config.json, safetensors)."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.model import Model, ModelConfig

_EXPERTS = re.compile(r"(layers\.\d+\.mlp)\.(gate_proj|up_proj|down_proj)$")


def hf_config(c: ModelConfig, dtype: str) -> dict[str, object]:
    """Returns the config.json of Qwen3MoeForCausalLM."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate * c.top_k,  # no dense layer uses it
        "moe_intermediate_size": c.intermediate,
        "num_experts": c.experts,
        "num_experts_per_tok": c.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.context,
        "vocab_size": c.vocab,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": dtype,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def hf_tensors(model: Model) -> dict[str, Tensor]:
    """Returns tensors under their Hugging Face names, with one tensor per expert."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        prefix = "" if name.startswith("lm_head") else "model."
        found = _EXPERTS.match(name)
        if not found:
            tensors[prefix + name] = value
            continue
        layer, projection = found.groups()
        for e, part in enumerate(value):
            weight = part.T if projection == "down_proj" else part
            tensors[f"{prefix}{layer}.experts.{e}.{projection}.weight"] = weight
    return tensors


def load_hf_tensors(model: Model, tensors: dict[str, Tensor]) -> None:
    """Loads a checkpoint into a model; the inverse of hf_tensors."""
    state = {}
    for name, value in model.state_dict().items():
        prefix = "" if name.startswith("lm_head") else "model."
        found = _EXPERTS.match(name)
        if not found:
            state[name] = tensors[prefix + name].to(value.dtype)
            continue
        layer, projection = found.groups()
        parts = [
            tensors[f"{prefix}{layer}.experts.{e}.{projection}.weight"] for e in range(len(value))
        ]
        stacked = torch.stack([p.T if projection == "down_proj" else p for p in parts])
        state[name] = stacked.to(value.dtype)
    model.load_state_dict(state)


def export(model: Model, directory: Path, *, dtype: str = "bfloat16") -> None:
    """Writes config.json and model.safetensors. training.pack writes the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    tensors = {
        name: value.detach().to("cpu", kind).contiguous()
        for name, value in sorted(hf_tensors(model).items())
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(hf_config(model.c, dtype), indent=1)
    (directory / "config.json").write_text(config + "\n")
