"""Typed access to the keys of a config.json; each mistake has its own error."""

from collections.abc import Mapping
from typing import Any

from afd.errors import ConfigError

Config = Mapping[str, object]


def architecture(config: Config) -> str:
    """Returns the first entry of `architectures`. Raises ConfigError if there is none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(
            "config.json has no architectures entry; use a checkpoint that vLLM can load"
        )
    return names[0]


def text_config(config: Config) -> Config:
    """Returns the keys of the text model, of a config.json that may nest them in `text_config`."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    outer = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key)}
    return {**outer, **nested, "architectures": config.get("architectures")}


def integer(config: Config, key: str, *, minimum: int = 1) -> int:
    """Returns `config[key]` as an int of at least `minimum`. Raises ConfigError."""
    if key not in config:
        raise ConfigError(f"config.json of {architecture(config)} has no {key}")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(
            f"config.json of {architecture(config)}: {key} is {value!r}, "
            f"expected a whole number of at least {minimum}"
        )
    return value


def number(config: Config, key: str) -> float:
    """Returns `config[key]` as a float above 0. Raises ConfigError."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(
            f"config.json of {architecture(config)}: {key} is {value!r}, expected a number above 0"
        )
    return float(value)


def layer_list(config: Config, key: str) -> tuple[int, ...]:
    """Returns layer numbers from a list or a string "1,2,3"; () if the key is absent or null."""
    value = config.get(key)
    entries: Any = value.strip().split(",") if isinstance(value, str) else value or ()
    try:
        return tuple(sorted(int(entry) for entry in entries))
    except (TypeError, ValueError):
        raise ConfigError(
            f"config.json of {architecture(config)}: {key} is {value!r}, expected layer numbers"
        ) from None


def dtype(config: Config) -> str:
    """Returns the checkpoint's dtype: `dtype` (Transformers 5) or `torch_dtype` (earlier).

    Raises:
        ConfigError: both keys are absent. Attention and FFN could then guess different dtypes.
    """
    value = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(value, str):
        raise ConfigError(
            f"config.json of {architecture(config)} has neither torch_dtype nor dtype; "
            'add "torch_dtype": "bfloat16" (or the dtype that the weights are stored in)'
        )
    return value.removeprefix("torch.")


def require_silu(config: Config) -> None:
    """Raises ConfigError unless the experts are SiLU-gated MLPs (the default)."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(
            f"config.json of {architecture(config)}: hidden_act is {activation!r}, "
            "but only silu is supported; use another checkpoint"
        )


def require_moe_layers(config: Config, layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns `layers`. Raises ConfigError if it is empty or has layers outside the model."""
    if not layers:
        raise ConfigError(
            f"{architecture(config)} with this config.json has no mixture-of-experts layer, so "
            "there are no experts to disaggregate; serve it with plain vLLM"
        )
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise ConfigError(
            f"config.json of {architecture(config)} lists mixture-of-experts layers {outside}, "
            f"but the model has layers 0 to {num_layers - 1}"
        )
    return layers
