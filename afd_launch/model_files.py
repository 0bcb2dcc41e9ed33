"""Whether two hosts have the same files of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from afd.errors import ConfigError
from afd_launch.findings import Row

_BLOCK = 1 << 16
_READ = 16 << 20
_SAMPLES = 256
_READERS = 8
_NAMED = 3


def hashes(model: Path, *, whole: bool) -> dict[str, str]:
    """SHA-256 (hex) of each file of a checkpoint, by its path below ``model``.

    whole: of every byte, which reads the checkpoint once. Otherwise of the size and of 256 blocks
    of 64 KiB, evenly spaced: that finds a file of another checkpoint or a cut one, but may miss a
    few wrong bytes.

    Raises:
        ConfigError: it is no folder, or a file cannot be read.
    """
    if not model.is_dir():
        raise ConfigError(f"--model {model} is no folder; give the folder of the checkpoint")
    files = sorted(
        path
        for path in model.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(model).parts)
    )
    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(lambda path: _hash(path, whole), files))
    return {str(path.relative_to(model)): text for path, text in zip(files, found, strict=True)}


def _hash(path: Path, whole: bool) -> str:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            if whole or size <= _BLOCK * _SAMPLES:
                whole_digest = hashlib.sha256()
                while block := stream.read(_READ):
                    whole_digest.update(block)
                return whole_digest.hexdigest()
            digest = hashlib.sha256(str(size).encode())
            for number in range(_SAMPLES):
                stream.seek((size - _BLOCK) * number // (_SAMPLES - 1))
                digest.update(stream.read(_BLOCK))
            return digest.hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def files_row(near: Mapping[str, str], far: Mapping[str, str], *, whole: bool) -> Row:
    """The hashes of both hosts compared. Pure."""
    how = "every byte" if whole else "sampled; --whole-files reads every byte"
    differ = [name for name in sorted(near.keys() | far.keys()) if near.get(name) != far.get(name)]
    if not differ:
        return Row("ok", "model files", f"{len(near)} files equal ({how})", "the same")
    words = [f"{name}{_where(name, near, far)}" for name in differ[:_NAMED]]
    more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
    text = f"{len(differ)} of {len(near.keys() | far.keys())} differ: {', '.join(words)}{more}"
    return Row("bad", "model files", text, "the same", "copy these files again, then compare")


def _where(name: str, near: Mapping[str, str], far: Mapping[str, str]) -> str:
    if name not in far:
        return " (only here)"
    return "" if name in near else " (only there)"
