"""Reads the planner's data files: YAML, validated by a pydantic model."""

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from afd.errors import ConfigError
from afd.host.package_data import data_folder

DATA = data_folder("afd_planner")
"""Folder of the package data: models, hardware, routing, simulate, topologies."""

NATURAL_LOADS = DATA / "routing" / "afd-tiny-chat.json"
"""Expert loads of the demo model on natural text, the planner's default."""

File = TypeVar("File", bound=BaseModel)


def read_yaml(path: Path, kind: type[File]) -> File:
    """Returns the file as ``kind``.

    Raises:
        ConfigError: The file cannot be read or does not validate. The message names the key.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return kind.model_validate(data)
    except (OSError, yaml.YAMLError) as err:
        raise ConfigError(f"cannot read {path}: {' '.join(str(err).split())}") from None
    except ValidationError as err:
        first = err.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path.name}: {place}: {first['msg']}") from None
