"""`afd doctor --active --save` and `--against`: a container beside bare metal.

The recipe is that of dstack's benchmark of containers on AMD GPUs (2025): the same collectives and
RDMA writes on bare metal and in a container, several times each, and the rates beside one another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from afd.errors import ConfigError
from afd_launch.findings import KINDS, Measured, Row, compared_with_bare
from afd_launch.host_facts import room_compared, room_of_this_host

_FORM = 1


def save(path: Path, measured: Sequence[Measured]) -> None:
    """Writes what was measured, and what this host offers. Raises ConfigError."""
    found = {
        "form": _FORM,
        "room": room_of_this_host(),
        "measured": [asdict(one) for one in measured],
    }
    try:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path}: {error.strerror}; name another file") from None


def against(path: Path, measured: Sequence[Measured], limits: Mapping[str, float]) -> list[Row]:
    """What this container measured, beside a file of :func:`save`. Raises ConfigError."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said["form"] != _FORM:
            raise ValueError("of another version")
        bare = [Measured(**{**one, "turns": tuple(one["turns"])}) for one in said["measured"]]
        if any(one.kind not in KINDS or not one.turns for one in bare):
            raise ValueError("of another version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--against {path}: {error}; write it on bare metal with afd doctor --active --save"
        ) from None
    rows = room_compared(said["room"], room_of_this_host())
    return rows + compared_with_bare(bare, measured, limits)
