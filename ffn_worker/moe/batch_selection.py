"""Selects, for each batch, the backend that measured fastest.

``afd bench moe --tune`` writes one file per device, ffn_worker/data/tuning/DEVICE/backends.json. A
measured shape uses the backend that was fastest at that number of rows. For any other
shape, measurements with the same weight scheme decide: it uses the backend that costs least at its
number of pairs per expert. With few pairs all backends wait for weights, and the Triton kernels
have the least overhead around the products. With many pairs DeepGEMM's products are faster.

Replayed graphs and eager calls are measured separately. Eager calls also pay for launches, which
matters for small layers. Pure; no torch.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from afd.errors import ConfigError
from afd.host.device_name import slug
from ffn_worker.moe.tiles import FOLDER, LayerShape

Steps = tuple[tuple[float, str], ...]
"""(threshold, backend), ascending by threshold."""

UNMEASURED: dict[str, Steps] = {
    "plain": ((0, "vllm_cuda"),),
    "fp8_block": ((0, "triton"), (32, "deep_gemm")),
}
"""Without a file: by scheme, the backend from so many pairs per expert on. For plain weights, what
colocated vLLM runs. 32 for FP8 is a guess: half of DeepGEMM's smallest tile."""


def mean_pairs(rows: int, top_k: int, num_experts: int) -> float:
    """Mean pairs (row, expert) per expert, if rows select all experts evenly."""
    return rows * top_k / num_experts


@dataclass(frozen=True)
class Comparison:
    """Times of all backends for one shape and number of rows.

    shape: its name in tuning files. pairs: mean pairs per expert. us: microseconds by backend.
    mode: "graph" (replayed) or "eager" (launched by the host).
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
    ) -> "Comparison":
        pairs = mean_pairs(rows, shape.top_k, shape.num_experts)
        return cls(shape.name, shape.scheme, rows, pairs, us, mode)

    @property
    def fastest(self) -> str:
        return min(self.us, key=lambda name: self.us[name])


@dataclass(frozen=True)
class Selection:
    """Which backend to use.

    shapes: by shape name, the backend for up to so many rows; larger batches use the last one.
    schemes: by scheme, for other shapes, the backend from so many pairs per expert on.
    """

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
        """Backends that may be selected for weights of a scheme."""
        of_shapes = (steps for shape, steps in self.shapes.items() if f"-{scheme}" in shape)
        every = (self.schemes.get(scheme, UNMEASURED[scheme]), *of_shapes)
        return frozenset(name for steps in every for _, name in steps)


@dataclass(frozen=True)
class SelectionByMode:
    """Selections for replayed graphs and for eager calls."""

    graph: Selection = field(default_factory=Selection)
    eager: Selection = field(default_factory=Selection)

    def of(self, mode: str) -> Selection:
        return self.eager if mode == "eager" else self.graph

    def names(self, scheme: str) -> frozenset[str]:
        return self.graph.names(scheme) | self.eager.names(scheme)


def select_by_mode(comparisons: Iterable[Comparison]) -> SelectionByMode:
    """Derives both selections. What was measured only as a graph also counts for eager calls."""
    found: dict[str, dict[tuple[str, int], Comparison]] = {"graph": {}, "eager": {}}
    for c in comparisons:
        found[c.mode][c.shape, c.rows] = c
    both = found["graph"] | found["eager"]
    return SelectionByMode(select(found["graph"].values()), select(both.values()))


def select(comparisons: Iterable[Comparison]) -> Selection:
    """Derives the selection from comparisons of one mode."""
    shapes: dict[str, list[tuple[float, str]]] = defaultdict(list)
    schemes: dict[str, dict[float, list[Comparison]]] = defaultdict(lambda: defaultdict(list))
    for c in sorted(comparisons, key=lambda c: c.rows):
        shapes[c.shape].append((c.rows, c.fastest))
        schemes[c.scheme][c.pairs].append(c)
    return Selection(
        {name: tuple(steps) for name, steps in shapes.items()},
        {
            scheme: tuple((pairs, _cheapest(by_pairs[pairs])) for pairs in sorted(by_pairs))
            for scheme, by_pairs in schemes.items()
        },
    )


def _cheapest(comparisons: Sequence[Comparison]) -> str:
    """The backend, among those in all comparisons, with the smallest geometric mean slowdown
    against the fastest backend of each comparison."""
    names = set.intersection(*(set(c.us) for c in comparisons))
    return min(sorted(names), key=lambda n: sum(math.log(c.us[n]) for c in comparisons))


def file_of(device: str, folder: Path = FOLDER) -> Path:
    return folder / slug(device) / "backends.json"


def read_comparisons(file: Path) -> tuple[Comparison, ...]:
    """The comparisons in a file; empty if the file does not exist.

    Raises:
        ConfigError: the file is not what `afd bench moe --tune` writes.
    """
    if not file.is_file():
        return ()
    try:
        comparisons = tuple(
            Comparison(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))["races"]
        )
        select_by_mode(comparisons)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not a tuning file ({error!r}); delete it or run afd bench moe --tune again"
        ) from None
    return comparisons


@cache
def selection_of(device: str, folder: Path = FOLDER) -> SelectionByMode:
    """The selections of a device; without a file those of ``UNMEASURED``.

    Args:
        device: torch's name, such as "NVIDIA H200".

    Raises:
        ConfigError: see :func:`read_comparisons`.
    """
    return select_by_mode(read_comparisons(file_of(device, folder)))


def write_comparisons(
    device: str, comparisons: Iterable[Comparison], command: str, date: str, folder: Path = FOLDER
) -> SelectionByMode:
    """Adds ``comparisons`` to the device's file and returns the selections from all in the file.

    A new comparison replaces an older one of the same shape, rows and mode.
    """
    file = file_of(device, folder)
    held = {(c.shape, c.rows, c.mode): c for c in (*read_comparisons(file), *comparisons)}
    kept = [held[key] for key in sorted(held)]
    entries = ",\n  ".join(json.dumps(asdict(c)) for c in kept)
    head = json.dumps({"device": device, "command": command, "date": date}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(f'{head[:-2]},\n "races": [\n  {entries}\n ]\n}}\n', encoding="utf-8")
    partial.replace(file)
    selection_of.cache_clear()
    return select_by_mode(kept)
