"""Typed access to the keys of a config.json, with one clear error for each way it can be wrong."""

from collections.abc import Mapping

from afd.errors import ConfigError

Config = Mapping[str, object]


def architecture(config: Config) -> str:
    """First entry of `architectures`. Raises ConfigError when there is none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError("config.json has no architectures entry; vLLM cannot load such a model")
    return names[0]


def integer(config: Config, key: str, *, minimum: int = 1) -> int:
    """`config[key]` as an int of at least `minimum`. Raises ConfigError naming the key."""
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
    """`config[key]` as a positive float. Raises ConfigError naming the key."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(
            f"config.json of {architecture(config)}: {key} is {value!r}, expected a number above 0"
        )
    return float(value)


def layer_list(config: Config, key: str) -> tuple[int, ...]:
    """A list of layer numbers, given as a list or as a string "1,2,3"; absent or null is empty."""
    value = config.get(key)
    entries = value.strip().split(",") if isinstance(value, str) else value or ()
    try:
        return tuple(sorted(int(entry) for entry in entries))  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ConfigError(
            f"config.json of {architecture(config)}: {key} is {value!r}, expected layer numbers"
        ) from None


def dtype(config: Config) -> str:
    """The checkpoint's dtype: `dtype` (Transformers 5) or `torch_dtype` (before).

    Raises:
        ConfigError: neither key is there, so that the two sides could guess differently.
    """
    value = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(value, str):
        raise ConfigError(
            f"config.json of {architecture(config)} has neither torch_dtype nor dtype; "
            'add "torch_dtype": "bfloat16" (or what the weights are stored in)'
        )
    return value.removeprefix("torch.")


def require_silu(config: Config) -> None:
    """Raises ConfigError unless the experts use SiLU-gated MLPs (absent means SiLU)."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(
            f"config.json of {architecture(config)}: hidden_act is {activation!r}, "
            "only silu experts are supported"
        )


def require_moe_layers(config: Config, layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """`layers`, checked to be non-empty and inside the model. Raises ConfigError otherwise."""
    if not layers:
        raise ConfigError(
            f"{architecture(config)} with this config.json has no mixture-of-experts layer; "
            "there is nothing to disaggregate"
        )
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise ConfigError(
            f"config.json of {architecture(config)} lists mixture-of-experts layers {outside}, "
            f"but the model has layers 0 to {num_layers - 1}"
        )
    return layers
