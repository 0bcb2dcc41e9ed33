"""PYTHONPATH of a child that finds its packages in other folders first."""

import os
from pathlib import Path

NAME = "PYTHONPATH"


def python_path(*first: Path) -> dict[str, str]:
    """Returns the variable by its name: these folders, then those of this process."""
    known = os.environ.get(NAME)
    return {NAME: os.pathsep.join([*map(str, first), *([known] if known else [])])}
