"""`afd examples`: copies the example deployments and dashboards of the package into a folder."""

from __future__ import annotations

import re
from pathlib import Path

from afd.errors import ConfigError
from afd.host.package_data import data_folder

_MODEL = re.compile(r"^model: (\.\.?/\S+)", re.MULTILINE)


def write_examples(folder: Path) -> list[Path]:
    """Write deployments into ``folder`` and dashboards below it; returns the files written.

    Paths of the demo model become absolute, so that the copies can be served from anywhere.

    Raises:
        ConfigError: a file exists already, or the folder cannot be written. Existing files are
            never changed.
    """
    data = data_folder("afd_launch")
    texts = {
        folder / source.name: with_absolute_model(source.read_text(encoding="utf-8"), source.parent)
        for source in sorted((data / "examples").glob("*.yaml"))
    }
    for source in sorted((data / "dashboards").rglob("*")):
        if source.is_file():
            texts[folder / source.relative_to(data)] = source.read_text(encoding="utf-8")
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path} exists; name another folder, or delete the file")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"cannot write {err.filename}: {err.strerror}") from None
    return list(texts)


def with_absolute_model(text: str, folder: Path) -> str:
    """A deployment file's text with its relative ``model:`` made absolute. Pure.

    Args:
        folder: where the file lies; relative paths start there.
    """
    return _MODEL.sub(lambda found: f"model: {(folder / found[1]).resolve()}", text)
