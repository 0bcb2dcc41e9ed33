"""The search for tiles: `afd bench moe --tune`.

The two launches of a layer share nothing but the height of their tiles, so that each is measured by
itself and the best pair of a height is put together: a sum of candidates, not a product. What may
be tried is data (configs/tuning/space.json), the same for every shape, and all of it is compiled at
once: a kernel is the same for all shapes and batches. A tile that the shape cannot take is skipped,
one that the compiler or the device refuses too, and one counts only if it computes what the rule's
does; the layer as it is put together is compared with the float32 reference.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from ffn_worker.bench.layers import BOUNDS, Problem, batch, error_against
from ffn_worker.bench.timing import Call, Clock, as_graph, repetitions_for
from ffn_worker.moe.tiles import (
    FOLDER,
    PARTS,
    Bucket,
    LayerShape,
    Part,
    Tile,
    Tiling,
    Tilings,
    default_tiling,
)
from ffn_worker.moe.tiles import problem as problem_of
from ffn_worker.moe.triton import Products, TritonBackend, accepted

logger = logging.getLogger("afd.bench")

FIELDS = ("m", "n", "k", "group_m", "warps", "stages", "swap")
"""Of an entry of the search space; the last may be missing."""


@dataclass(frozen=True)
class Cut:
    """One launch: m pairs per tile, and the rest of it."""

    m: int
    tile: Tile


Evaluate = Callable[[Part, Cut, float], float | None]
"""(launch, cut, limit) -> its seconds; None where it cannot be so, is wrong, or takes much longer
than ``limit``."""


def read_space(file: Path = FOLDER / "space.json") -> dict[str, tuple[Cut, ...]]:
    """Candidates by scheme, likely ones first.

    Raises:
        ConfigError: the file is not one of these.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if tuple(data.pop("fields")) != FIELDS:
            raise ValueError(f"fields must be {', '.join(FIELDS)}")
        return {
            scheme: tuple(_cut(*map(int, cut)) for cut in cuts) for scheme, cuts in data.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no search space ({error!r}); restore it from git") from None


def _cut(m: int, n: int, k: int, group_m: int, warps: int, stages: int, swap: int = 0) -> Cut:
    return Cut(m, Tile(n, k, group_m, warps, stages, bool(swap)))


def heights(shape: LayerShape, rows: int) -> range:
    """Values of m worth trying: tiles of which neither most is empty nor an expert has many."""
    mean = rows * shape.top_k / shape.num_experts
    return range(int(min(mean / 4, 64)), int(max(4 * mean, 64)) + 1)


def search(cuts: Iterable[Cut], evaluate: Evaluate, deadline: float) -> list[tuple[float, Tiling]]:
    """Tilings put together of the quickest launches of each height: (seconds of both launches,
    tiling), quickest first. After ``deadline`` (time.monotonic) only heights are finished that lack
    a launch."""
    best: dict[Part, dict[int, tuple[float, Tile]]] = {part: {} for part in PARTS}
    for cut in dict.fromkeys(cuts):
        for part in PARTS:
            found = best[part]
            if time.monotonic() > deadline and cut.m in found:
                continue
            limit = min((took for took, _ in found.values()), default=float("inf"))
            took = evaluate(part, cut, limit)
            if took is not None and (cut.m not in found or took < found[cut.m][0]):
                found[cut.m] = took, cut.tile
    first, second = (best[part] for part in PARTS)
    both = [
        (first[m][0] + second[m][0], Tiling(m, first[m][1], second[m][1]))
        for m in first.keys() & second.keys()
    ]
    return sorted(both, key=lambda found: found[0])


class Layer:
    """The first layer of a problem on the Triton backend, cut as it is told to be."""

    def __init__(self, problem: Problem, hip: bool) -> None:
        self.problem = problem
        self._hip = hip
        self.tiling: Tiling | None = None
        weights = problem.layers[0]
        self.backend = TritonBackend(
            problem.shard.slots, problem.model.num_experts, tilings=self._now
        )
        self.backend.prepare(0, weights.w13, weights.w2)
        if weights.shared_gate_up is not None and weights.shared_down is not None:
            self.backend.prepare_shared(0, weights.shared_gate_up, weights.shared_down)
        self.shape = problem.shape

    def _now(self, shape: LayerShape, rows: int) -> Tiling:
        self.shape = shape  # as the backend names it when it looks for its tiling
        return self.tiling or default_tiling(shape, rows, self._hip)

    def default(self, rows: int) -> Tiling:
        return default_tiling(self.shape, rows, self._hip)


class Bench:
    """A layer at one number of rows: times of the whole and of its launches."""

    def __init__(self, layer: Layer, rows: int, clock: Clock) -> None:
        self._layer, self._clock = layer, clock
        problem = layer.problem
        self._given = given = batch(problem.shape, rows, problem.device)
        self._bound = BOUNDS[problem.scheme]
        reference = problem.ffn("reference")
        self._want = reference.forward(0, given.encoded, given.ids, given.weights).float()
        start, end = problem.shard.slots
        local = (given.ids >= start) & (given.ids < end)
        shared = bool(problem.shape.shared)
        self._local = F.pad(local, (0, int(shared))).flatten().nonzero().squeeze(1)
        self._products: dict[int, Products] = {}
        self._right: dict[Part, torch.Tensor] = {}

    def layer_seconds(self, tiling: Tiling) -> float | None:
        """Of the whole layer cut so; None where it is refused or wrong."""
        given = self._given

        def forward() -> torch.Tensor:
            return self._layer.backend.forward_encoded(
                0, given.encoded, given.ids, given.weights, torch.bfloat16
            )

        if problem_of(self._layer.shape, tiling) is not None:
            return None
        self._layer.tiling = tiling
        try:
            if self._wrong(self._want, forward(), tiling):
                return None
            return self._clock(self._replayed(forward), 20)
        except Exception as refused:  # whatever compiler and driver raise for a tile too large
            logger.debug("%s: %s", tiling, refused)
            return None

    def start(self, tiling: Tiling) -> None:
        """Takes what the launches of this tiling write for right.

        Raises: whatever compiler and driver raise.
        """
        self._first = tiling.gate_up
        products = self._at(tiling.m)
        for part in PARTS:
            _call(products, part)(getattr(tiling, part))
            self._right[part] = self._written(part)

    def compile(self, cuts: Iterable[Cut]) -> None:
        """All of these, several at a time."""
        from triton import AsyncCompileMode

        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for cut in cuts:
                for part in PARTS:
                    if self._fits(part, cut):
                        _call(self._at(cut.m), part)(cut.tile, compile_only=True)

    def launch_seconds(self, part: Part, cut: Cut, limit: float) -> float | None:
        """An :data:`Evaluate`."""
        if not self._fits(part, cut):
            return None
        launch, products = _call(self._at(cut.m), part), self._at(cut.m)

        def call() -> None:
            launch(cut.tile)

        try:
            call()
            if self._wrong(self._right[part], self._written(part), cut):
                products.gate_up(self._first)  # the input of the other launch
                return None
            roughly = self._clock(call, 3)
            if roughly > 1.5 * max(limit, 1e-4):  # a launch from Python takes some 50 us
                return None
            times = repetitions_for(roughly, 2e-3)

            def repeated() -> None:
                for _ in range(times):
                    call()

            return self._clock(self._replayed(repeated), 1) / times
        except Exception as refused:
            logger.debug("%s of %s: %s", part, cut, refused)
            return None

    def _at(self, m: int) -> Products:
        """Launches with their pairs sorted in blocks of m, all on the same memory."""
        found = self._products.get(m)
        if found is None:
            given, held = self._given, self._layer.problem.layers[0].w13
            rows = accepted(given.encoded, held.tag, torch.bfloat16)
            found = self._layer.backend.products(0, rows, given.ids, m, torch.bfloat16)
            if self._products:
                first = next(iter(self._products.values()))
                found = replace(found, act=first.act, y=first.y)
            self._products[m] = found
        return found

    def _written(self, part: Part) -> torch.Tensor:
        """Float32: what a launch wrote for the pairs of local routed experts."""
        products = next(iter(self._products.values()))
        written = products.act if part == "gate_up" else products.y
        return written.decode(torch.float32)[self._local]

    def _wrong(self, want: torch.Tensor, got: torch.Tensor, what: object) -> bool:
        error = error_against(want, got) if len(want) else 0.0
        if error <= self._bound:
            return False
        logger.warning("wrong by %.3g, left out: %s", error, what)
        return True

    def _fits(self, part: Part, cut: Cut) -> bool:
        one = Tiling(cut.m, cut.tile, cut.tile)
        return problem_of(self._layer.shape, one, (part,)) is None

    def _replayed(self, call: Call) -> Call:
        return call if self._layer.problem.device.type == "cpu" else as_graph(call)


def _call(products: Products, part: Part) -> Callable[..., None]:
    return products.gate_up if part == "gate_up" else products.down


@torch.inference_mode()
def tune(
    problem: Problem,
    rows: tuple[int, ...],
    space: dict[str, tuple[Cut, ...]],
    clock: Clock,
    hip: bool,
    seconds: float,
    held: Tilings | None = None,
) -> tuple[LayerShape, tuple[Bucket, ...]]:
    """Tilings of one shape: (the shape as its file is named, one bucket per entry of ``rows``).

    A bucket takes an even part of ``seconds``, and begins with what was best in the one before and
    with what ``held`` says.
    """
    layer = Layer(problem, hip)
    buckets: list[Bucket] = []
    ends = time.monotonic() + seconds
    for index, count in enumerate(sorted(rows)):
        bench, default = Bench(layer, count, clock), layer.default(count)
        timed = {default: bench.layer_seconds(default)}  # after this the shape has its name
        tilings = [default] + ([buckets[-1].tiling] if buckets else [])
        tilings += [held(layer.shape, count)] if held is not None else []
        timed |= {t: bench.layer_seconds(t) for t in tilings if t != default}
        ran = [tiling for tiling, took in timed.items() if took is not None]
        if not ran:
            logger.warning("%s: nothing runs at %d rows", layer.shape.name, count)
            continue
        bench.start(ran[0])
        known = [Cut(t.m, tile) for t in reversed(tilings) for tile in (t.gate_up, t.down)]
        worth = heights(layer.shape, count)
        cuts = [*known, *(cut for cut in space[layer.shape.scheme] if cut.m in worth)]
        bench.compile(cuts)
        deadline = time.monotonic() + (ends - time.monotonic()) / (len(rows) - index)
        for _, tiling in search(cuts, bench.launch_seconds, deadline)[:2]:
            if tiling not in timed:
                timed[tiling] = bench.layer_seconds(tiling)
        tiling, took = min(
            ((t, s) for t, s in timed.items() if s is not None), key=lambda found: found[1]
        )
        rule = timed[default] or took
        buckets.append(Bucket(count, tiling, took * 1e6, rule * 1e6))
        logger.info(
            "%s, %d rows: %.1f us (rule: %.1f us)",
            layer.shape.name, count, took * 1e6, rule * 1e6,
        )  # fmt: skip
    return layer.shape, tuple(buckets)
