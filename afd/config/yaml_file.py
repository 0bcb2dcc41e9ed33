"""Reads the YAML of a deployment file and of ``--set KEY=VALUE``, before any key is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from afd.config.messages import is_list, subsection
from afd.errors import ConfigError


class _DuplicateKey(Exception):
    """A mapping has a key twice. lines: those of both places, counted from 1."""

    def __init__(self, key: str, lines: tuple[int, int]) -> None:
        super().__init__(key, lines)
        self.key, self.lines = key, lines


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself silently takes the last of several equal keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not in construct_mapping, where merge keys (<<) have added keys to the node.
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _DuplicateKey(key.value, (lines[key.value], line))
            lines[key.value] = line
        return node


def _load(text: str) -> Any:
    """Returns the data of one YAML document. Raises YAMLError, _DuplicateKey."""
    return yaml.load(text, Loader=_Loader)


def read_sections(path: Path, root: type[BaseModel]) -> dict[str, Any]:
    """Returns the keys of the file; an empty section of ``root`` ("ffn:") is an empty dict.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}; give the path of a deployment YAML") from None
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"cannot read {path} ({err}); give the path of a deployment YAML"
        ) from None
    try:
        data = _load(text)
    except _DuplicateKey as err:
        first, second = err.lines
        raise ConfigError(
            f"{path.name} has the key {err.key} twice, on lines {first} and {second};"
            " remove one of them"
        ) from None
    except yaml.YAMLError as err:
        raise ConfigError(
            f"{path.name} is not YAML: {' '.join(str(err).split())}; correct that line"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path.name} is not a deployment file; it must have keys such as model: PATH"
        )
    return {
        key: _empty(root.model_fields.get(key)) if value is None else value
        for key, value in data.items()
    }


def _empty(field: FieldInfo | None) -> Any:
    """The value of a key without one: an empty section or list of sections, else None."""
    if subsection(field) is None:
        return None
    return [] if is_list(field) else {}


def override(data: dict[str, Any], item: str, source: str) -> None:
    """Replaces one key of ``data`` in place.

    Args:
        item: such as ``pipeline.depth=2``. source: name of the file that ``data`` is from.

    Raises:
        ConfigError: the item is not KEY=VALUE, or its key is inside of a value.
    """
    key, equals, text = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {item} is not KEY=VALUE; write, for example, pipeline.depth=2")
    try:
        value = _load(text)
    except _DuplicateKey as err:
        raise ConfigError(f"--set {item}: {err.key} is there twice; remove one of them") from None
    except yaml.YAMLError:
        raise ConfigError(f"--set {item}: the value is not YAML; quote it") from None
    section = data
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"--set {item}: {part} in {source} is a value, not a section;"
                " write SECTION.KEY=VALUE"
            )
    section[parts[-1]] = value
