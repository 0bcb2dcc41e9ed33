"""Checks values of the deployment file against the registries of devices and choices."""

import difflib
from collections.abc import Iterable

from afd.config.choices import Choice, choices
from afd.devices import DEVICES


def device_value(name: str) -> str:
    """Returns ``name`` if it is a device. Raises ValueError otherwise."""
    return one_of(name, DEVICES)


def moe_backend(name: str) -> str:
    """Returns ``name`` if ``ffn.backend`` may name it. Raises ValueError otherwise."""
    return one_of(name, choices("moe_backend"))


def reduce_format(name: str) -> str:
    """Returns ``name`` if ``ffn.reduce`` may name it. Raises ValueError otherwise."""
    return one_of(name, choices("reduce_format"))


def reducer(name: str) -> str:
    """Returns ``name`` if ``ffn.reduce_backend`` may name it. Raises ValueError otherwise."""
    return one_of(name, choices("reduce_backend"))


def one_of(name: str, valid: Iterable[str]) -> str:
    """Returns ``name`` if it is valid. Raises ValueError with the list and the nearest name."""
    names = tuple(dict.fromkeys(valid))
    if name in names:
        return name
    listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"must be {listed}{hint}")


def check_device(key: str, choice: Choice, device: str, remedy: str) -> None:
    """Raises ValueError if ``choice``, the value of ``key``, does not run on ``device``."""
    if choice.devices and device not in choice.devices:
        fitting = " and ".join(choice.devices)
        raise ValueError(f"{key} {choice.name} runs on device {fitting}, not {device}; {remedy}")
