"""Model families: one data file each, selected by the architecture in config.json."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from afd.errors import ConfigError
from afd.models import deepseek, qwen3_moe, step3
from afd.models.family import Family, MlpNames, MoeModel
from afd.models.fields import architecture

__all__ = [
    "FAMILIES",
    "Family",
    "MlpNames",
    "MoeModel",
    "family_of",
    "read_config",
    "read_model",
]

FAMILIES: tuple[Family, ...] = (qwen3_moe.FAMILY, deepseek.FAMILY, step3.FAMILY)


def family_of(config: Mapping[str, object]) -> Family:
    """Returns the family of this config.json. Raises ConfigError with the supported names."""
    wanted = architecture(config)
    for family in FAMILIES:
        if wanted in family.vllm_class:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ConfigError(
        f"architecture {wanted} is not supported; use a checkpoint of one of these: {supported}"
    )


def read_config(path: str | PathLike[str]) -> dict[str, object]:
    """Returns config.json of a local checkpoint folder.

    Raises:
        ConfigError: the folder or its config.json is missing, or the file is no JSON object.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"model {directory} is not a folder; give a local folder with config.json and "
            "safetensors files"
        )
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"model {directory} has no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object; download it again")
    return config


def read_model(path: str | PathLike[str]) -> tuple[Family, MoeModel]:
    """Returns family and shape of a local checkpoint. `Family.serve_as` sets the serving dtype.

    Reads only config.json; `afd.models.checkpoint.tensor_table` checks the weights.

    Raises:
        ConfigError: the model is unreadable, unsupported or inconsistent, or is quantised in a
            format that is not supported.
    """
    config = read_config(path)
    family = family_of(config)
    if config.get("quantization_config"):
        _require_fp8_blocks(config["quantization_config"], path)
    model = family.parse(config)
    if model.top_k > model.num_experts:
        raise ConfigError(
            f"config.json of {path} is inconsistent: it routes to {model.top_k} experts per token "
            f"but has {model.num_experts}; download it again"
        )
    return family, model


def _require_fp8_blocks(quantization: object, path: str | PathLike[str]) -> None:
    """Raises ConfigError unless the format is DeepSeek-V3's: FP8 in blocks of 128 x 128."""
    facts = quantization if isinstance(quantization, dict) else {}
    method, blocks = facts.get("quant_method"), facts.get("weight_block_size")
    if method != "fp8" or blocks != [128, 128] or facts.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"{path} is quantized in a format that is not supported (quant_method {method}, "
            f"weight_block_size {blocks} in config.json); use a checkpoint in FP8 with blocks of "
            "[128, 128], or the bfloat16 checkpoint"
        )
