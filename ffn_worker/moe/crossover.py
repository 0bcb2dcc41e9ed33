"""From how many pairs per expert on DeepGEMM is quicker than the Triton kernels.

With few, both wait for weights, and less stands around the Triton kernels' products. One number per
device, ``least_pairs`` in configs/tuning/DEVICE/deep_gemm.json, which ``afd bench moe --tune``
measures and writes. Pure; no torch.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from afd.device_name import slug
from afd.errors import ConfigError
from ffn_worker.moe.tiles import FOLDER

UNMEASURED = 32.0
"""Where there is no file: a guess, half of the least tile."""


def mean_pairs(rows: int, top_k: int, num_experts: int) -> float:
    """Pairs (row, expert) of an expert if rows choose evenly among all."""
    return rows * top_k / num_experts


@dataclass(frozen=True)
class Race:
    """Both on one shape and row count. pairs: mean per expert. Times in any one unit."""

    pairs: float
    triton: float
    deep_gemm: float


def crossover(races: Sequence[Race]) -> float:
    """The ``least_pairs`` that costs least against always taking the quicker one, by the sum of the
    logarithms of the ratios; infinite if DeepGEMM should never be taken."""

    def cost(least: float) -> float:
        taken = (race.deep_gemm if race.pairs >= least else race.triton for race in races)
        return sum(map(math.log, taken))

    return min((*sorted({race.pairs for race in races}), math.inf), key=cost)


def file_of(device: str, folder: Path = FOLDER) -> Path:
    return folder / slug(device) / "deep_gemm.json"


@cache
def least_pairs(device: str, folder: Path = FOLDER) -> float:
    """The device's number; UNMEASURED without a file.

    Args:
        device: name as torch gives it, "NVIDIA H200".

    Raises:
        ConfigError: the file is not what the bench writes.
    """
    file = file_of(device, folder)
    if not file.is_file():
        return UNMEASURED
    try:
        least = json.loads(file.read_text(encoding="utf-8"))["least_pairs"]
        return math.inf if least is None else float(least)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is no tuning file ({error!r}); delete it or run afd bench moe --tune again"
        ) from None


def write_least_pairs(
    device: str, races: Sequence[Race], command: str, date: str, folder: Path = FOLDER
) -> float:
    """Writes the device's number, found from ``races``, and returns it."""
    least = crossover(races)
    document = {
        "device": device,
        "least_pairs": None if math.isinf(least) else least,
        "cells": len(races),
        "command": command,
        "date": date,
    }
    file = file_of(device, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return least
