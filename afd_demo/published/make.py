"""Writes a tiny random checkpoint that is laid out like a published one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from afd.errors import ConfigError
from afd.models.checkpoint import INDEX_FILE
from afd_demo import tokenizer, weights
from afd_demo.published import grouped, multimodal
from afd_demo.published.deepseek import deepseek_v3_mtp, deepseek_v32, kimi_k2
from afd_demo.published.gpt_oss import gpt_oss
from afd_demo.published.quantised import FORMATS
from afd_demo.published.qwen3_next import qwen3_next
from afd_demo.sizes import Sizes
from afd_demo.weights import Config, Drawn, Sink, Tensors

LAYOUTS: dict[str, Callable[[Sink, Sizes, str], Config]] = {
    "qwen2_moe": grouped.qwen2_moe,
    "qwen3_moe": grouped.qwen3_moe,
    "mixtral": grouped.mixtral,
    "glm4_moe": grouped.glm4_moe,
    "ernie45_moe": grouped.ernie45_moe,
    "minimax_m2": grouped.minimax_m2,
    "deepseek_v2": weights.deepseek_v2,
    "deepseek_v3": weights.deepseek_v3,
    "deepseek_v3_mtp": deepseek_v3_mtp,
    "deepseek_v32": deepseek_v32,
    "kimi_k2": kimi_k2,
    "gpt_oss": gpt_oss,
    "llama4": multimodal.llama4,
    "qwen3_next": qwen3_next,
    "step3_text": weights.step3,
    "step3_vl": multimodal.step3_vl,
}
"""By name, what draws the tensors and returns config.json."""
FIRST_LIKELY = 16


def make_published(
    layout: str,
    directory: Path,
    sizes: Sizes,
    *,
    stored_as: str = "plain",
    twin: Path | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    likely: int = 0,
) -> None:
    """Writes config, index, two weight files and tokenizer to ``directory``; creates it.

    Args:
        layout: a key of LAYOUTS. stored_as: "plain" or a key of ``quantised.FORMATS``.
        twin: gets the unquantised checkpoint with the values of the quantised one.
        likely: so many tokens are nearly always the likeliest, so that random draft layers draft
            tokens that are accepted.

    Raises:
        ConfigError: the layout or the format is unknown.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    if stored_as not in (known := ("plain", *FORMATS)):
        raise ConfigError(f"format {stored_as!r} is unknown; use one of {', '.join(known)}")
    drawn = Drawn(seed, sizes.hidden, dtype)
    config = LAYOUTS[layout](drawn, sizes, dtype)
    if likely:
        head = drawn.tensors["lm_head.weight"]
        head[FIRST_LIKELY : FIRST_LIKELY + likely] *= head.dtype.type(6)
    if stored_as == "plain":
        write(directory, config, drawn.tensors, sizes.vocab)
        return
    result = FORMATS[stored_as](drawn.tensors)
    quantised = config | {"quantization_config": result.quantization}
    write(directory, quantised, result.stored, sizes.vocab)
    if twin is not None:
        write(twin, config, result.twin, sizes.vocab)


def write(directory: Path, config: Config, tensors: Tensors, vocab: int) -> None:
    """Writes config.json, two weight files, their index and a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    names = list(tensors)
    half = len(names) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        _save(directory / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    tokenizer.write(directory, vocab)


def _save(file: Path, tensors: Tensors) -> None:
    """Writes a safetensors file. safetensors.numpy knows no FP8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        offsets = [begin, begin + tensor.nbytes]
        dtype = _DTYPES[tensor.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        begin += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligned, as the format asks for
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor).tobytes())


_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
}
