"""Random LoRA adapters in PEFT's layout, and checkpoints with an adapter merged in."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from afd.models.checkpoint import tensor_table

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK, ALPHA = 4, 16
ADAPTERS = ("first", "second")
"""Names under which :func:`adapter_arguments` makes them."""


def make_adapter(folder: Path, checkpoint: Path, seed: int, modules: Sequence[str]) -> Path:
    """Writes an adapter that changes these modules of every layer of the checkpoint."""
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, info in tensor_table(checkpoint).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules and len(info.shape) == 2:
            rows, columns = info.shape
            below = f"base_model.model.{module}.lora_"
            tensors[f"{below}A.weight"] = torch.randn(RANK, columns, generator=random) / 8
            tensors[f"{below}B.weight"] = torch.randn(rows, RANK, generator=random) / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Writes the checkpoint in float32 with the adapter added to its weights."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            tensors |= {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118  # a safe_open is no mapping
            if name.endswith(".lora_A.weight"):
                down, up = stored.get_tensor(name), stored.get_tensor(name.replace("_A.", "_B."))
                module = name.removeprefix("base_model.model.").partition(".lora_")[0]
                tensors[f"{module}.weight"] += ALPHA / RANK * (up @ down)
    save_file(tensors, folder / "model.safetensors")
    return folder


def adapter_arguments(model: Path) -> list[str]:
    """Makes LoRA adapters of attention beside the model, once. Returns vLLM's arguments."""
    folder = model.parent / "adapters"
    if not folder.exists():
        folder.mkdir()
        for seed, name in enumerate(ADAPTERS):
            make_adapter(folder / name, model, seed, ATTENTION)
    lora = ["--enable-lora", f"--max-loras={len(ADAPTERS)}", "--max-lora-rank=8", "--lora-modules"]
    return lora + [f"{name}={folder / name}" for name in ADAPTERS]
