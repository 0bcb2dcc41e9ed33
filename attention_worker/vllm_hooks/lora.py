"""Which modules of an attention instance LoRA adapters may change: the attention projections.

An adapter of other modules cannot be served whole: the experts are on the FFN instances, which
hold no adapters.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from safetensors import safe_open
from torch import nn
from vllm.model_executor.layers.linear import LinearBase

from afd.errors import ConfigError
from afd.models import Family


def attention_projections(model: nn.Module, family: Family) -> list[str]:
    """Returns the last names of the linear modules inside attention, such as qkv_proj, sorted."""
    below = f".{family.attention}."
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if below in name and isinstance(module, LinearBase)
        }
    )


def check_adapter(name: str, path: Path, allowed: Collection[str]) -> None:
    """Raises ConfigError if an adapter changes modules other than the attention projections.

    Args:
        path: folder of a PEFT adapter. One without adapter_model.safetensors is left to vLLM.
        allowed: last names of modules as adapters name them, such as q_proj.
    """
    weights = path / "adapter_model.safetensors"
    if not weights.is_file():
        return
    with safe_open(weights, framework="pt") as file:
        others = outside(file.keys(), allowed)
    if others:
        raise ConfigError(
            f"LoRA adapter {name} ({path}) changes {', '.join(others)}, but attention instances"
            f" take adapters of attention only ({', '.join(sorted(allowed))}): FFN instances hold"
            " none; train it with target_modules of attention, or merge it into the checkpoint"
        )


def outside(tensors: Iterable[str], allowed: Collection[str]) -> list[str]:
    """Returns the modules, by their last names, that an adapter changes outside ``allowed``.

    Args:
        tensors: names such as base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight.
    """
    found = set()
    for tensor in tensors:
        module = tensor.partition(".lora_")[0]
        last = module.rpartition(".")[2]
        if ".experts" in module:
            found.add("experts")
        elif last not in allowed:
            found.add(last)
    return sorted(found)


def unpacked(packed: dict[str, list[str]], names: Iterable[str]) -> set[str]:
    """Returns the names that adapters use: q_proj, k_proj and v_proj for vLLM's qkv_proj.

    Args:
        packed: vLLM's ``packed_modules_mapping`` of the model class.
    """
    return {part for name in names for part in packed.get(name, [name])}
