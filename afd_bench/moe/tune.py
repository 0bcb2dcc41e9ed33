"""Searches tile sizes: `afd bench moe --tune`.

The two launches of a layer share only the height of their tiles, m. So each launch is measured on
its own, and the best tiles of both for one m make a tiling: the search takes the sum of the
candidates, not their product. Candidates are data (ffn_worker/data/tuning/space.json), the same for
every shape, and all are compiled at once: one kernel serves all shapes and batches. A candidate is
skipped if the shape does not support it, if the compiler or the device rejects it, or if its
results differ from those of the default rule. The complete layer is compared with the float32
reference.
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
from afd_bench.moe.layers import BOUNDS, Problem, batch, error_against
from afd_bench.moe.timing import Call, Clock, as_graph, repetitions_for
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

logger = logging.getLogger("afd_bench")

FIELDS = ("m", "n", "k", "group_m", "warps", "stages", "swap")
"""Fields of a candidate in the file; the last is optional."""


@dataclass(frozen=True)
class Candidate:
    """Tile sizes of one launch: m pairs per tile, and the rest."""

    m: int
    tile: Tile


Evaluate = Callable[[Part, Candidate, float], float | None]
"""(launch, candidate, limit) -> seconds; None if the candidate is unsupported, gives wrong results,
or takes much longer than ``limit`` seconds."""


def read_space(file: Path = FOLDER / "space.json") -> dict[str, tuple[Candidate, ...]]:
    """Candidates by scheme, the most promising first.

    Raises:
        ConfigError: the file is not a search space.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if tuple(data.pop("fields")) != FIELDS:
            raise ValueError(f"fields must be {', '.join(FIELDS)}")
        return {
            scheme: tuple(_candidate(*map(int, candidate)) for candidate in candidates)
            for scheme, candidates in data.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not a search space ({error!r}); restore it from git"
        ) from None


def _candidate(
    m: int, n: int, k: int, group_m: int, warps: int, stages: int, swap: int = 0
) -> Candidate:
    return Candidate(m, Tile(n, k, group_m, warps, stages, bool(swap)))


def heights(shape: LayerShape, rows: int) -> range:
    """Range of m worth trying: tiles are not mostly empty, and an expert does not have many."""
    mean = rows * shape.top_k / shape.num_experts
    return range(int(min(mean / 4, 64)), int(max(4 * mean, 64)) + 1)


def search(
    candidates: Iterable[Candidate], evaluate: Evaluate, deadline: float
) -> list[tuple[float, Tiling]]:
    """Combines, for each m, the fastest candidates of both launches.

    Returns (seconds of both launches, tiling), fastest first. After ``deadline`` (time.monotonic)
    it measures only launches for which an m has no time yet.
    """
    best: dict[Part, dict[int, tuple[float, Tile]]] = {part: {} for part in PARTS}
    for candidate in dict.fromkeys(candidates):
        for part in PARTS:
            found = best[part]
            if time.monotonic() > deadline and candidate.m in found:
                continue
            limit = min((took for took, _ in found.values()), default=float("inf"))
            took = evaluate(part, candidate, limit)
            if took is not None and (candidate.m not in found or took < found[candidate.m][0]):
                found[candidate.m] = took, candidate.tile
    first, second = (best[part] for part in PARTS)
    both = [
        (first[m][0] + second[m][0], Tiling(m, first[m][1], second[m][1]))
        for m in first.keys() & second.keys()
    ]
    return sorted(both, key=lambda found: found[0])


class Layer:
    """The first layer of a problem on the Triton backend, with a tiling that can be set."""

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
        self.shape = shape  # the backend's name for it, with the shared expert
        return self.tiling or default_tiling(shape, rows, self._hip)

    def default(self, rows: int) -> Tiling:
        return default_tiling(self.shape, rows, self._hip)


class Bench:
    """Times a layer, and its launches, at one number of rows."""

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
        """Seconds of the whole layer with a tiling; None if it is rejected or wrong."""
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
        except Exception as refused:  # the compiler or the driver rejects the tile
            logger.debug("%s: %s", tiling, refused)
            return None

    def start(self, tiling: Tiling) -> None:
        """Records the outputs of this tiling as the correct ones.

        Raises: any error of the compiler and the driver.
        """
        self._first = tiling.gate_up
        products = self._at(tiling.m)
        for part in PARTS:
            _call(products, part)(getattr(tiling, part))
            self._right[part] = self._written(part)

    def compile(self, candidates: Iterable[Candidate]) -> None:
        """Compiles all candidates, several at a time."""
        from triton import AsyncCompileMode

        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for candidate in candidates:
                for part in PARTS:
                    if self._fits(part, candidate):
                        _call(self._at(candidate.m), part)(candidate.tile, compile_only=True)

    def launch_seconds(self, part: Part, candidate: Candidate, limit: float) -> float | None:
        """An :data:`Evaluate`."""
        if not self._fits(part, candidate):
            return None
        launch, products = _call(self._at(candidate.m), part), self._at(candidate.m)

        def call() -> None:
            launch(candidate.tile)

        try:
            call()
            if self._wrong(self._right[part], self._written(part), candidate):
                products.gate_up(self._first)  # restores the input of the other launch
                return None
            roughly = self._clock(call, 3)
            if roughly > 1.5 * max(limit, 1e-4):  # a launch from Python takes about 50 us
                return None
            times = repetitions_for(roughly, 2e-3)

            def repeated() -> None:
                for _ in range(times):
                    call()

            return self._clock(self._replayed(repeated), 1) / times
        except Exception as refused:
            logger.debug("%s of %s: %s", part, candidate, refused)
            return None

    def _at(self, m: int) -> Products:
        """Launches with pairs sorted in blocks of m. All of them share their memory."""
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
        """What a launch wrote for the pairs of local experts, in float32."""
        products = next(iter(self._products.values()))
        written = products.act if part == "gate_up" else products.y
        return written.decode(torch.float32)[self._local]

    def _wrong(self, want: torch.Tensor, got: torch.Tensor, what: object) -> bool:
        error = error_against(want, got) if len(want) else 0.0
        if error <= self._bound:
            return False
        logger.warning("%s is wrong by %.3g; skipping it", what, error)
        return True

    def _fits(self, part: Part, candidate: Candidate) -> bool:
        one = Tiling(candidate.m, candidate.tile, candidate.tile)
        return problem_of(self._layer.shape, one, (part,)) is None

    def _replayed(self, call: Call) -> Call:
        return call if self._layer.problem.device.type == "cpu" else as_graph(call)


def _call(products: Products, part: Part) -> Callable[..., None]:
    return products.gate_up if part == "gate_up" else products.down


@torch.inference_mode()
def tune(
    problem: Problem,
    rows: tuple[int, ...],
    space: dict[str, tuple[Candidate, ...]],
    clock: Clock,
    hip: bool,
    seconds: float,
    held: Tilings | None = None,
) -> tuple[LayerShape, tuple[Bucket, ...]]:
    """Searches tilings for one shape.

    Each bucket gets an equal part of ``seconds``. Its search starts with the best tiling of the
    previous bucket and with the tiling that ``held`` gives.

    Returns:
        (the shape, as its tuning file is named; one bucket per entry of ``rows``).
    """
    layer = Layer(problem, hip)
    buckets: list[Bucket] = []
    ends = time.monotonic() + seconds
    for index, count in enumerate(sorted(rows)):
        bench, default = Bench(layer, count, clock), layer.default(count)
        timed = {default: bench.layer_seconds(default)}  # this also sets layer.shape
        tilings = [default] + ([buckets[-1].tiling] if buckets else [])
        tilings += [held(layer.shape, count)] if held is not None else []
        timed |= {t: bench.layer_seconds(t) for t in tilings if t != default}
        ran = [tiling for tiling, took in timed.items() if took is not None]
        if not ran:
            logger.warning("%s: no tiling runs at %d rows; skipping them", layer.shape.name, count)
            continue
        bench.start(ran[0])
        known = [Candidate(t.m, tile) for t in reversed(tilings) for tile in (t.gate_up, t.down)]
        worth = heights(layer.shape, count)
        candidates = [
            *known,
            *(candidate for candidate in space[layer.shape.scheme] if candidate.m in worth),
        ]
        bench.compile(candidates)
        deadline = time.monotonic() + (ends - time.monotonic()) / (len(rows) - index)
        for _, tiling in search(candidates, bench.launch_seconds, deadline)[:2]:
            if tiling not in timed:
                timed[tiling] = bench.layer_seconds(tiling)
        tiling, took = min(
            ((t, s) for t, s in timed.items() if s is not None), key=lambda found: found[1]
        )
        rule = timed[default] or took
        buckets.append(Bucket(count, tiling, took * 1e6, rule * 1e6))
        logger.info(
            "%s, %d rows: %.1f us (default rule: %.1f us)",
            layer.shape.name, count, took * 1e6, rule * 1e6,
        )  # fmt: skip
    return layer.shape, tuple(buckets)
