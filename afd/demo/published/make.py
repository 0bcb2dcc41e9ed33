"""Writes a tiny random checkpoint that is laid out like a published one."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import save_file

from afd.demo import tokenizer, weights
from afd.demo.published import grouped, multimodal
from afd.demo.published.deepseek import kimi_k2
from afd.demo.published.gpt_oss import gpt_oss
from afd.demo.published.qwen3_next import qwen3_next
from afd.demo.sizes import Sizes
from afd.demo.weights import Config, Drawn, Sink, Tensors
from afd.errors import ConfigError
from afd.models.checkpoint import INDEX_FILE

LAYOUTS: dict[str, Callable[[Sink, Sizes, str], Config]] = {
    "qwen2_moe": grouped.qwen2_moe,
    "qwen3_moe": grouped.qwen3_moe,
    "mixtral": grouped.mixtral,
    "glm4_moe": grouped.glm4_moe,
    "ernie45_moe": grouped.ernie45_moe,
    "minimax_m2": grouped.minimax_m2,
    "deepseek_v2": weights.deepseek_v2,
    "deepseek_v3": weights.deepseek_v3,
    "kimi_k2": kimi_k2,
    "gpt_oss": gpt_oss,
    "llama4": multimodal.llama4,
    "qwen3_next": qwen3_next,
    "step3_vl": multimodal.step3_vl,
}
"""By name, what draws the tensors and returns config.json."""


def make_published(
    layout: str, directory: Path, sizes: Sizes, *, seed: int = 0, dtype: str = "bfloat16"
) -> None:
    """Writes config, index, two weight files and tokenizer to ``directory``; creates it.

    Raises:
        ConfigError: the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    drawn = Drawn(seed, sizes.hidden, dtype)
    config = LAYOUTS[layout](drawn, sizes, dtype)
    write(directory, config, drawn.tensors)
    tokenizer.write(directory, sizes.vocab)


def write(directory: Path, config: Config, tensors: Tensors) -> None:
    """Writes config.json, two weight files and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    names = list(tensors)
    half = len(names) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
