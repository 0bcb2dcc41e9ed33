"""Which way a message of an all-reduce goes: a table per number of ranks, dtype and format.

One file per device, configs/allreduce/DEVICE.json, which ``afd bench allreduce --table`` measures;
for other devices the default, which is from published figures. Pure, without torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from afd.device_name import slug
from afd.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "configs" / "allreduce"
DEFAULT = FOLDER / "default.json"
_FIELDS = {"world", "dtype", "format", "one_shot_max_bytes", "two_shot_min_bytes"}


class Way(Enum):
    ONE_SHOT = "one_shot"
    """exact, through peer memory"""
    LIBRARY = "library"
    """exact, NCCL or RCCL"""
    TWO_SHOT = "two_shot"
    """in the format that was asked for, or exact, through peer memory"""


@dataclass(frozen=True)
class Crossover:
    """Bytes of a message, in its own dtype, at which the way changes.

    two_shot_min_bytes: None where the library is never slower.
    """

    one_shot_max_bytes: int
    two_shot_min_bytes: int | None

    def way(self, nbytes: int) -> Way:
        if self.two_shot_min_bytes is not None and nbytes >= self.two_shot_min_bytes:
            return Way.TWO_SHOT
        return Way.ONE_SHOT if nbytes <= self.one_shot_max_bytes else Way.LIBRARY


def table_of(device: str, folder: Path = FOLDER) -> Path:
    """The table of a device, named as torch names it; the default where none was measured."""
    measured = folder / f"{slug(device)}.json"
    return measured if measured.is_file() else DEFAULT


def read_crossover(path: Path, world: int, dtype: str, fmt: str) -> Crossover:
    """The row for these ranks, this dtype ("bfloat16") and format ("int4", "exact").

    A number of ranks that was not measured takes the row of the next larger one, else of the
    largest.

    Raises:
        ConfigError: the file is not such a table, or has no row for the dtype and format.
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
    """The row of the device's own table; None if it has none for so many ranks or more.

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
    """The table's row from latencies by message size, each in microseconds.

    One shot up to the last size from which on downwards it always wins over the library; two shots
    from the first size on from which they always win over the better of both. A way that was not
    measured at a size loses there.
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
            raise ValueError(f"a row has other fields than {', '.join(sorted(_FIELDS))}")
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(
            f"{path} is no all-reduce table ({err}); write one with afd bench allreduce --table"
        ) from None
    return [row for row in rows if row["dtype"] == dtype and row["format"] == fmt]
