"""Model families: one data file each, found by the architecture named in config.json."""

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
    """The family that serves this config.json. Raises ConfigError naming what is supported."""
    wanted = architecture(config)
    for family in FAMILIES:
        if wanted in family.vllm_class:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ConfigError(f"architecture {wanted} is not supported; supported are {supported}")


def read_config(path: str | PathLike[str]) -> dict[str, object]:
    """config.json of a local model directory.

    Raises:
        ConfigError: no such directory, no config.json in it, or not a JSON object.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {directory} does not exist; give a local directory that holds "
            "config.json and safetensors files"
        )
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(f"{directory} has no config.json; it is not a model directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return config


def read_model(path: str | PathLike[str]) -> tuple[Family, MoeModel]:
    """Family and shape of a local checkpoint; `Family.serve_as` then settles the serving dtype.

    Reads config.json only; `afd.checkpoint.tensor_table` checks the weights.

    Raises:
        ConfigError: unreadable, unsupported, inconsistent or quantized model.
    """
    config = read_config(path)
    family = family_of(config)
    if config.get("quantization_config"):
        _require_fp8_blocks(config["quantization_config"], path)
    model = family.parse(config)
    if model.top_k > model.num_experts:
        raise ConfigError(
            f"{path} routes to {model.top_k} experts per token but has {model.num_experts}; "
            "config.json is inconsistent"
        )
    return family, model


def _require_fp8_blocks(quantization: object, path: str | PathLike[str]) -> None:
    """Raises ConfigError unless it is DeepSeek-V3's format, FP8 by blocks of 128 x 128."""
    facts = quantization if isinstance(quantization, dict) else {}
    method, blocks = facts.get("quant_method"), facts.get("weight_block_size")
    if method != "fp8" or blocks != [128, 128] or facts.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"{path} is a quantized checkpoint of a kind that is not read (quant_method {method}, "
            f"weight_block_size {blocks} in config.json); use one in FP8 by blocks of [128, 128], "
            "or the bfloat16 checkpoint of the model"
        )
