"""Locates a package's data files, in a checkout and in an installed wheel."""

import importlib.resources
from pathlib import Path


def data_folder(package: str) -> Path:
    """Returns the folder ``data`` of an importable package, such as ``afd_planner``."""
    return Path(str(importlib.resources.files(package))) / "data"
