"""Which of several backends computes a batch: the one that was quickest when it was measured.

One file per device, configs/tuning/DEVICE/backends.json, which ``afd bench moe --tune`` measures
and writes: for each shape the quickest backend by rows, and for shapes that were not measured the
one that costs least by pairs per expert, per scheme of the weights. With few pairs all wait for
weights, and little stands around the Triton kernels' products; with many, DeepGEMM's products are
quicker. Pure; no torch.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from afd.device_name import slug
from afd.errors import ConfigError
from ffn_worker.moe.tiles import FOLDER, LayerShape

Steps = tuple[tuple[float, str], ...]
"""(value, backend), ascending by value."""

UNMEASURED: dict[str, Steps] = {
    "plain": ((0, "vllm_cuda"),),
    "fp8_block": ((0, "triton"), (32, "deep_gemm")),
}
"""By scheme, from how many pairs per expert on a backend is taken where there is no file: what
colocated vLLM runs; and a guess, half of DeepGEMM's least tile."""


def mean_pairs(rows: int, top_k: int, num_experts: int) -> float:
    """Pairs (row, expert) of an expert if rows choose evenly among all."""
    return rows * top_k / num_experts


@dataclass(frozen=True)
class Race:
    """All backends on one shape and row count. times: by backend, in any one unit."""

    shape: LayerShape
    rows: int
    times: Mapping[str, float]

    @property
    def pairs(self) -> float:
        return mean_pairs(self.rows, self.shape.top_k, self.shape.num_experts)

    @property
    def quickest(self) -> str:
        return min(self.times, key=lambda name: self.times[name])


@dataclass(frozen=True)
class Choices:
    """shapes: by shape name, the backend for up to so many rows; a larger batch takes the last.
    schemes: by scheme, the backend from so many pairs per expert on."""

    shapes: Mapping[str, Steps] = field(default_factory=dict)
    schemes: Mapping[str, Steps] = field(default_factory=lambda: UNMEASURED)

    def of(self, shape: LayerShape, rows: int) -> str:
        """The backend for a batch of ``rows`` rows."""
        if steps := self.shapes.get(shape.name):
            return next((name for up_to, name in steps if rows <= up_to), steps[-1][1])
        steps = self.schemes.get(shape.scheme, UNMEASURED[shape.scheme])
        pairs = mean_pairs(rows, shape.top_k, shape.num_experts)
        return next((name for least, name in reversed(steps) if pairs >= least), steps[0][1])

    def names(self) -> frozenset[str]:
        """Backends that may be taken."""
        every = (*UNMEASURED.values(), *self.shapes.values(), *self.schemes.values())
        return frozenset(name for steps in every for _, name in steps)


def chosen(races: Sequence[Race]) -> Choices:
    """What ``races`` tell."""
    shapes: dict[str, list[tuple[float, str]]] = defaultdict(list)
    schemes: dict[str, dict[float, list[Race]]] = defaultdict(lambda: defaultdict(list))
    for race in sorted(races, key=lambda race: race.rows):
        shapes[race.shape.name].append((race.rows, race.quickest))
        schemes[race.shape.scheme][race.pairs].append(race)
    return Choices(
        {name: tuple(steps) for name, steps in shapes.items()},
        {
            scheme: tuple((pairs, _cheapest(by_pairs[pairs])) for pairs in sorted(by_pairs))
            for scheme, by_pairs in schemes.items()
        },
    )


def _cheapest(races: Sequence[Race]) -> str:
    """The backend, of those that all races have, that costs least against always taking the
    quickest: by the sum of the logarithms of the ratios."""
    names = set.intersection(*(set(race.times) for race in races))
    return min(sorted(names), key=lambda n: sum(math.log(race.times[n]) for race in races))


def file_of(device: str, folder: Path = FOLDER) -> Path:
    return folder / slug(device) / "backends.json"


@cache
def choices_of(device: str, folder: Path = FOLDER) -> Choices:
    """The device's choices; without a file those of ``UNMEASURED``.

    Args:
        device: name as torch gives it, "NVIDIA H200".

    Raises:
        ConfigError: the file is not what the bench writes.
    """
    file = file_of(device, folder)
    if not file.is_file():
        return Choices()
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        return Choices(_steps(document["shapes"]), _steps(document["schemes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no tuning file ({error!r}); delete it or run afd bench moe --tune again"
        ) from None


def _steps(found: Mapping[str, Sequence[Sequence[object]]]) -> dict[str, Steps]:
    return {
        key: tuple((float(str(value)), str(name)) for value, name in steps)
        for key, steps in found.items()
    }


def write_choices(
    device: str, races: Sequence[Race], command: str, date: str, folder: Path = FOLDER
) -> Choices:
    """Replaces the device's file by what ``races`` tell, and returns it."""
    found = chosen(races)
    document = {
        "device": device,
        "command": command,
        "date": date,
        "schemes": found.schemes,
        "shapes": found.shapes,
    }
    file = file_of(device, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
    choices_of.cache_clear()
    return found
