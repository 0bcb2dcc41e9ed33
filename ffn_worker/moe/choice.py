"""Which of several backends computes a batch: the one that was quickest when it was measured.

One file per device, configs/tuning/DEVICE/backends.json, holds what ``afd bench moe --tune``
measured there. A shape that was measured takes the quickest backend by rows; another one, of the
same scheme of the weights, the backend that costs least at so many pairs per expert. With few pairs
all wait for weights, and little stands around the Triton kernels' products; with many, DeepGEMM's
products are quicker. A call that the host launches, instead of a replayed graph, has races of its
own: there launches count, which small layers wait for. Pure; no torch.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    """All backends on one shape and row count.

    shape: its name, as tuning files have it. pairs: mean per expert. us: by backend, in
    microseconds. mode: "graph", replayed, or "eager", launched by the host.
    """

    shape: str
    scheme: str
    rows: int
    pairs: float
    us: Mapping[str, float]
    mode: str = "graph"

    @classmethod
    def on(
        cls, shape: LayerShape, rows: int, us: Mapping[str, float], mode: str = "graph"
    ) -> "Race":
        pairs = mean_pairs(rows, shape.top_k, shape.num_experts)
        return cls(shape.name, shape.scheme, rows, pairs, us, mode)

    @property
    def quickest(self) -> str:
        return min(self.us, key=lambda name: self.us[name])


@dataclass(frozen=True)
class Choices:
    """shapes: by shape name, the backend for up to so many rows; a larger batch takes the last.
    schemes: by scheme, the backend from so many pairs per expert on."""

    shapes: Mapping[str, Steps] = field(default_factory=dict)
    schemes: Mapping[str, Steps] = field(default_factory=dict)

    def of(self, shape: LayerShape, rows: int) -> str:
        """The backend for a batch of ``rows`` rows."""
        if steps := self.shapes.get(shape.name):
            return next((name for up_to, name in steps if rows <= up_to), steps[-1][1])
        steps = self.schemes.get(shape.scheme, UNMEASURED[shape.scheme])
        pairs = mean_pairs(rows, shape.top_k, shape.num_experts)
        return next((name for least, name in reversed(steps) if pairs >= least), steps[0][1])

    def names(self, scheme: str) -> frozenset[str]:
        """Backends that may be taken for weights of a scheme."""
        of_shapes = (steps for shape, steps in self.shapes.items() if f"-{scheme}" in shape)
        every = (self.schemes.get(scheme, UNMEASURED[scheme]), *of_shapes)
        return frozenset(name for steps in every for _, name in steps)


@dataclass(frozen=True)
class ChoicesByMode:
    """Of replayed graphs, and of calls that the host launches."""

    graph: Choices = field(default_factory=Choices)
    eager: Choices = field(default_factory=Choices)

    def of(self, mode: str) -> Choices:
        return self.eager if mode == "eager" else self.graph

    def names(self, scheme: str) -> frozenset[str]:
        return self.graph.names(scheme) | self.eager.names(scheme)


def chosen_by_mode(races: Iterable[Race]) -> ChoicesByMode:
    """What ``races`` tell. Where only a graph was raced, its race counts for the host too."""
    found: dict[str, dict[tuple[str, int], Race]] = {"graph": {}, "eager": {}}
    for race in races:
        found[race.mode][race.shape, race.rows] = race
    both = found["graph"] | found["eager"]
    return ChoicesByMode(chosen(found["graph"].values()), chosen(both.values()))


def chosen(races: Iterable[Race]) -> Choices:
    """What ``races`` tell, all of one mode."""
    shapes: dict[str, list[tuple[float, str]]] = defaultdict(list)
    schemes: dict[str, dict[float, list[Race]]] = defaultdict(lambda: defaultdict(list))
    for race in sorted(races, key=lambda race: race.rows):
        shapes[race.shape].append((race.rows, race.quickest))
        schemes[race.scheme][race.pairs].append(race)
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
    names = set.intersection(*(set(race.us) for race in races))
    return min(sorted(names), key=lambda n: sum(math.log(race.us[n]) for race in races))


def file_of(device: str, folder: Path = FOLDER) -> Path:
    return folder / slug(device) / "backends.json"


def read_races(file: Path) -> tuple[Race, ...]:
    """None if there is no such file.

    Raises:
        ConfigError: it is not what the bench writes.
    """
    if not file.is_file():
        return ()
    try:
        races = tuple(
            Race(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))["races"]
        )
        chosen_by_mode(races)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no tuning file ({error!r}); delete it or run afd bench moe --tune again"
        ) from None
    return races


@cache
def choices_of(device: str, folder: Path = FOLDER) -> ChoicesByMode:
    """The device's choices; without a file those of ``UNMEASURED``.

    Args:
        device: name as torch gives it, "NVIDIA H200".

    Raises:
        ConfigError: see :func:`read_races`.
    """
    return chosen_by_mode(read_races(file_of(device, folder)))


def write_races(
    device: str, races: Iterable[Race], command: str, date: str, folder: Path = FOLDER
) -> ChoicesByMode:
    """Adds ``races`` to the device's file, in the place of older ones of the same shape, rows and
    mode; what all of them tell."""
    file = file_of(device, folder)
    held = {(race.shape, race.rows, race.mode): race for race in (*read_races(file), *races)}
    kept = [held[key] for key in sorted(held)]
    entries = ",\n  ".join(json.dumps(asdict(race)) for race in kept)
    head = json.dumps({"device": device, "command": command, "date": date}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(f'{head[:-2]},\n "races": [\n  {entries}\n ]\n}}\n', encoding="utf-8")
    partial.replace(file)
    choices_of.cache_clear()
    return chosen_by_mode(kept)
