"""Crossover tables: which algorithm quickreduce uses for a message, by its size.

``afd bench allreduce --table`` measures one file per device,
ffn_worker/data/allreduce/DEVICE.json, with one row per number of ranks, dtype and format. Other
devices use default.json, which is taken from published figures. Pure, without torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from afd.errors import ConfigError
from afd.host.device_name import slug
from afd.host.package_data import data_folder

FOLDER = data_folder("ffn_worker") / "allreduce"
DEFAULT = FOLDER / "default.json"
_FIELDS = {"world", "dtype", "format", "one_shot_max_bytes", "two_shot_min_bytes"}


class Algorithm(Enum):
    ONE_SHOT = "one_shot"
    """Every rank sends everything to every rank through peer memory; exact."""
    LIBRARY = "library"
    """NCCL or RCCL; exact."""
    TWO_SHOT = "two_shot"
    """Reduce-scatter and all-gather through peer memory, in the configured format or exact."""


@dataclass(frozen=True)
class Crossover:
    """Message sizes, in bytes of the rows' own dtype, at which the algorithm changes.

    two_shot_min_bytes: None if the library is never slower.
    """

    one_shot_max_bytes: int
    two_shot_min_bytes: int | None

    def algorithm(self, nbytes: int) -> Algorithm:
        """The fastest algorithm for a message of ``nbytes`` bytes."""
        if self.two_shot_min_bytes is not None and nbytes >= self.two_shot_min_bytes:
            return Algorithm.TWO_SHOT
        return Algorithm.ONE_SHOT if nbytes <= self.one_shot_max_bytes else Algorithm.LIBRARY


def table_of(device: str, folder: Path = FOLDER) -> Path:
    """Path of the table of a device (torch's name); default.json if none was measured."""
    measured = folder / f"{slug(device)}.json"
    return measured if measured.is_file() else DEFAULT


def read_crossover(path: Path, world: int, dtype: str, fmt: str) -> Crossover:
    """The row for a number of ranks, a dtype ("bfloat16") and a format ("int4", "exact").

    If this number of ranks was not measured, the row of the next larger number applies, else that
    of the largest.

    Raises:
        ConfigError: the file is not a crossover table, or has no row for the dtype and format.
    """
    fitting = _rows(path, dtype, fmt)
    if not fitting:
        raise ConfigError(
            f"{path} has no row for {dtype} and {fmt}; add one with afd bench allreduce --table"
        )
    larger = [row for row in fitting if row["world"] >= world]
    return _nearest(larger or fitting, world)


def measured_crossover(
    device: str, world: int, dtype: str, fmt: str, folder: Path = FOLDER
) -> Crossover | None:
    """The row of the device's own table; None if it has no row for ``world`` ranks or more.

    Raises:
        ConfigError: see :func:`read_crossover`.
    """
    table = table_of(device, folder)
    rows = _rows(table, dtype, fmt) if table != DEFAULT else []
    larger = [row for row in rows if row["world"] >= world]
    return _nearest(larger, world) if larger else None


def crossover_of(
    one_shot_us: dict[int, float], library_us: dict[int, float], two_shot_us: dict[int, float]
) -> Crossover:
    """Computes a table row from latencies in microseconds by message size in bytes.

    One-shot is used up to the largest size below which it always beats the library. Two-shot is
    used from the smallest size above which it always beats both others. An algorithm without a
    measurement at a size loses there.
    """
    never = float("inf")
    one_shot_max = 0
    for size in sorted(library_us):
        if one_shot_us.get(size, never) > library_us[size]:
            break
        one_shot_max = size
    two_shot_min = None
    for size in sorted(library_us, reverse=True):
        best = min(library_us[size], one_shot_us.get(size, never))
        if two_shot_us.get(size, never) >= best:
            break
        two_shot_min = size
    return Crossover(one_shot_max, two_shot_min)


def _nearest(rows: Sequence[dict[str, Any]], world: int) -> Crossover:
    row = min(rows, key=lambda row: abs(row["world"] - world))
    return Crossover(row["one_shot_max_bytes"], row["two_shot_min_bytes"])


def _rows(path: Path, dtype: str, fmt: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        if not all(set(row) == _FIELDS for row in rows):
            raise ValueError(f"a row has fields other than {', '.join(sorted(_FIELDS))}")
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(
            f"{path} is not an all-reduce table ({err}); write one with afd bench allreduce --table"
        ) from None
    return [row for row in rows if row["dtype"] == dtype and row["format"] == fmt]
