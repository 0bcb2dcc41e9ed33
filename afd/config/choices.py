"""What a key of the deployment file may name: registered where each thing is written."""

import importlib.metadata
from dataclasses import dataclass
from functools import cache

from afd.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """One value of a key. ``devices``: device names it runs on; empty: any device."""

    name: str
    devices: tuple[str, ...] = ()


@cache
def choices(key: str) -> dict[str, Choice]:
    """The values of ``key``, an entry point of the group ``afd.choices``, by name, in order."""
    for point in importlib.metadata.entry_points(group="afd.choices", name=key):
        return {choice.name: choice for choice in point.load()}
    raise ConfigError(f"the entry point {key} of group afd.choices is not installed; reinstall afd")
