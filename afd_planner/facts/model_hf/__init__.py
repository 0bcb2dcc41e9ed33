"""Reads a Hugging Face config.json as a ``ModelSpec``, for model families that vLLM serves.

Each entry of ``families.FAMILIES`` maps architectures to the functions that read their attention
and FFN layers. Sources: vLLM 0.26 model_executor/models and transformers_utils/configs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from afd.errors import ConfigError
from afd.models import read_config
from afd.models.fields import Config, architecture, integer
from afd_planner.facts.attention import Attention
from afd_planner.facts.ffn import Ffn
from afd_planner.facts.files import DATA, read_yaml
from afd_planner.facts.model import LayerGroup, ModelSpec
from afd_planner.facts.model_hf.families import family_of

FOLDER = DATA / "models"


class _File(BaseModel):
    """A file of afd_planner/data/models. ``config``: keys of the publisher's config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    total_parameters: Annotated[float, Field(ge=0)]
    activated_parameters: Annotated[float, Field(ge=0)]
    sources: tuple[str, ...]
    config: dict[str, object]


def models() -> tuple[str, ...]:
    """Returns the sorted names of all models that come with the planner."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_model(name: str) -> ModelSpec:
    """Returns a model that comes with the planner, or one read from a path.

    Args:
        name: A name such as ``step-3``, a folder with a config.json, or a config.json file.

    Raises:
        ConfigError: The model is unknown or its config.json cannot be read as one.
    """
    if name.lower() in models():
        return _read_file(FOLDER / f"{name.lower()}.yaml")
    path = Path(name)
    if path.is_dir():
        return from_config(read_config(path), path.resolve().name)
    if path.is_file():
        return from_config(_read_json(path), path.resolve().parent.name)
    raise ConfigError(
        f"model {name!r} is unknown and no such path exists; give one of {', '.join(models())}, or"
        " a folder with a config.json"
    )


def from_config(
    config: Config,
    name: str,
    *,
    title: str = "",
    published_total: float = 0.0,
    published_activated: float = 0.0,
    sources: tuple[str, ...] = (),
) -> ModelSpec:
    """Returns the ModelSpec of a config.json; of a multimodal model, that of its language model.

    Raises:
        ConfigError: The family is unknown, or a key that it needs is missing or invalid.
    """
    family, text = family_of(config)
    layers = integer(text, "num_hidden_layers")
    attention, ffn = family.attention(text, layers), family.ffn(text, layers)
    kinds: dict[tuple[Attention, Ffn], list[int]] = {}
    for layer, kind in enumerate(zip(attention, ffn, strict=True)):
        kinds.setdefault(kind, []).append(layer)
    context = text.get("max_position_embeddings", text.get("max_seq_len", 0))
    return ModelSpec(
        name=name,
        title=title or name,
        architecture=architecture(text),
        hidden=integer(text, "hidden_size"),
        vocab=integer(text, "vocab_size"),
        tied=bool(text.get("tie_word_embeddings", family.tied)),
        groups=tuple(
            LayerGroup(tuple(indices), core, mlp) for (core, mlp), indices in kinds.items()
        ),
        max_context=context if isinstance(context, int) else 0,
        dtype=_weight_format(text),
        published_total=published_total,
        published_activated=published_activated,
        sources=sources,
    )


def _weight_format(config: Config) -> str:
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method in ("fp8", "mxfp4"):
        return str(method)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return str(dtype).removeprefix("torch.")


def _read_file(path: Path) -> ModelSpec:
    file = read_yaml(path, _File)
    return from_config(
        file.config,
        path.stem,
        title=file.title,
        published_total=file.total_parameters,
        published_activated=file.activated_parameters,
        sources=file.sources,
    )


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"{path} cannot be read as JSON: {err}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return config
