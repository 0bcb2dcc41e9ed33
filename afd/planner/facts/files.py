"""Reading the data files of configs/: YAML checked by a pydantic model, errors in one sentence."""

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from afd.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
"""The data that comes with the repository."""

File = TypeVar("File", bound=BaseModel)


def read_yaml(path: Path, kind: type[File]) -> File:
    """The file as ``kind``. Raises ConfigError naming the file and what is wrong in it."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return kind.model_validate(data)
    except (OSError, yaml.YAMLError) as err:
        raise ConfigError(f"cannot read {path}: {' '.join(str(err).split())}") from None
    except ValidationError as err:
        first = err.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path.name}: {place}: {first['msg']}") from None
