"""Model families: one data file each, selected by the architecture in config.json."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from afd.errors import ConfigError
from afd.models import (
    deepseek,
    ernie45_moe,
    glm4_moe,
    gpt_oss,
    llama4,
    minimax_m2,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    step3,
)
from afd.models.family import Family, MlpNames, MoeModel
from afd.models.fields import architecture
from afd.models.quantization import Quantization, quantization_of

__all__ = [
    "FAMILIES",
    "Family",
    "MlpNames",
    "MoeModel",
    "Quantization",
    "family_of",
    "read_config",
    "read_model",
    "read_quantization",
]

MODELOPT_FILE = "hf_quant_config.json"
"""Older ModelOpt checkpoints describe their quantisation here and not in config.json."""

FAMILIES: tuple[Family, ...] = (
    qwen3_moe.FAMILY,
    qwen2_moe.FAMILY,
    qwen2_moe.NEXT,
    mixtral.FAMILY,
    deepseek.FAMILY,
    deepseek.V32,
    glm4_moe.FAMILY,
    ernie45_moe.FAMILY,
    minimax_m2.FAMILY,
    gpt_oss.FAMILY,
    llama4.FAMILY,
    step3.FAMILY,
)


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
    return _json_object(file)


def _json_object(file: Path) -> dict[str, object]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object; download it again")
    return config


def read_quantization(path: str | PathLike[str]) -> Quantization:
    """Returns the formats in which a local checkpoint folder stores its linear layers.

    Raises:
        ConfigError: as :func:`read_config` and :func:`afd.models.quantization.quantization_of` do.
    """
    config = read_config(path)
    beside = Path(path) / MODELOPT_FILE
    try:
        return quantization_of(config, _json_object(beside) if beside.is_file() else None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_model(path: str | PathLike[str]) -> tuple[Family, MoeModel]:
    """Returns family and shape of a local checkpoint. `Family.serve_as` sets the serving dtype.

    Reads only config.json; `afd.models.checkpoint.tensor_table` checks the weights.

    Raises:
        ConfigError: the model is unreadable, unsupported or inconsistent, or is quantised in a
            format that is not supported.
    """
    config = read_config(path)
    family = family_of(config)
    read_quantization(path)  # raises if the format is not supported
    model = family.parse(config)
    if model.top_k > model.num_experts:
        raise ConfigError(
            f"config.json of {path} is inconsistent: it routes to {model.top_k} experts per token "
            f"but has {model.num_experts}; download it again"
        )
    return family, model
