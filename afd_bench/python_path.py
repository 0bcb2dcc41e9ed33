"""PYTHONPATH of a child that finds its packages in other folders first."""

import os
from collections.abc import Mapping
from pathlib import Path

NAME = "PYTHONPATH"


def python_path(*first: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variable by its name: these folders, then those of the environment."""
    known = environment.get(NAME)
    return {NAME: os.pathsep.join([*map(str, first), *([known] if known else [])])}
