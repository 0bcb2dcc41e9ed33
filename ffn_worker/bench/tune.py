"""The search for tiles: `afd bench moe --tune`.

One axis at a time from the rule's tiling on, until no axis gains: a product of all axes would be
thousands of compilations. What may be tried is data (configs/tuning/space.json); a tiling that the
shape cannot take is skipped, one that the compiler or the device refuses too, and one counts only
if its results agree with the reference.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from afd.errors import ConfigError
from ffn_worker.bench.layers import BOUNDS, Problem, batch, error_against
from ffn_worker.bench.timing import Clock, as_graph
from ffn_worker.moe.tiles import FOLDER, Bucket, LayerShape, Tiling, default_tiling
from ffn_worker.moe.tiles import problem as problem_of
from ffn_worker.moe.triton import TritonBackend

logger = logging.getLogger("afd.bench")

Space = dict[str, tuple[int, ...]]
"""Values of ``m`` and of each field of a Tile."""
Evaluate = Callable[[Tiling], float | None]
"""Seconds of a layer cut so; None where it cannot be, or is wrong."""

AXES = ("m", "gate_up.n", "down.n", "gate_up.k", "down.k", "gate_up.warps", "down.warps",
        "gate_up.stages", "down.stages", "gate_up.group_m", "down.group_m")  # fmt: skip
GAIN = 0.99
"""A tiling must be this much quicker: less is noise."""


def read_space(file: Path = FOLDER / "space.json") -> Space:
    """Raises ConfigError if a field is missing or holds anything but whole numbers."""
    fields = ("m", "n", "k", "group_m", "warps", "stages")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return {name: tuple(int(value) for value in data[name]) for name in fields}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no search space ({error!r}); restore it from git") from None


@dataclass(frozen=True)
class Found:
    """tried: tilings that were timed."""

    tiling: Tiling
    seconds: float
    tried: int


def search(start: Tiling, space: Space, evaluate: Evaluate, deadline: float) -> Found | None:
    """The quickest tiling that was met, at most until ``deadline`` (time.monotonic).

    ``start`` itself need not run; None if nothing that was tried does.
    """
    seen: dict[Tiling, float] = {start: _seconds(evaluate(start))}
    best, improved = start, True
    while improved and time.monotonic() <= deadline:
        improved = False
        for axis in AXES:
            for candidate in _along(best, axis, space):
                if candidate in seen or time.monotonic() > deadline:
                    continue
                seen[candidate] = _seconds(evaluate(candidate))
                if seen[candidate] < GAIN * seen[best]:
                    best, improved = candidate, True
    if math.isinf(seen[best]):
        return None
    return Found(best, seen[best], sum(math.isfinite(took) for took in seen.values()))


def _seconds(took: float | None) -> float:
    return math.inf if took is None else took


def _along(tiling: Tiling, axis: str, space: Space) -> Iterator[Tiling]:
    """All values of one axis, the rest as it is."""
    part, _, name = axis.rpartition(".")
    for value in space[name]:
        if not part:
            yield replace(tiling, m=value)
        elif part == "gate_up":
            yield replace(tiling, gate_up=replace(tiling.gate_up, **{name: value}))
        else:
            yield replace(tiling, down=replace(tiling.down, **{name: value}))


class Layer:
    """One layer of a problem on the Triton backend, cut as it is told to be."""

    def __init__(self, problem: Problem, hip: bool) -> None:
        self._problem = problem
        self._hip = hip
        self._tiling: Tiling | None = None
        weights = problem.layers[0]
        backend = TritonBackend(problem.shard.experts, problem.model.num_experts, tilings=self._now)
        backend.prepare(0, weights.w13, weights.w2)
        if weights.shared_gate_up is not None and weights.shared_down is not None:
            backend.prepare_shared(0, weights.shared_gate_up, weights.shared_down)
        self._backend = backend
        self.shape = problem.shape

    def _now(self, shape: LayerShape, rows: int) -> Tiling:
        self.shape = shape  # as the backend names it when it looks for its tiling
        return self._tiling or default_tiling(shape, rows, self._hip)

    def evaluator(self, rows: int, clock: Clock) -> Evaluate:
        """Times of this layer at ``rows`` rows, as a graph on a GPU."""
        problem = self._problem
        given = batch(problem.shape, rows, problem.device)
        reference = problem.ffn("reference")
        want = reference.forward(0, given.encoded, given.ids, given.weights).float()

        def forward() -> torch.Tensor:
            return self._backend.forward_encoded(
                0, given.encoded, given.ids, given.weights, torch.bfloat16
            )

        def evaluate(tiling: Tiling) -> float | None:
            if problem_of(self.shape, tiling) is not None:
                return None
            self._tiling = tiling
            try:
                error = error_against(want, forward())
                if not error <= BOUNDS[problem.scheme]:
                    logger.warning("wrong by %.3g, left out: %s", error, tiling)
                    return None
                call = forward if problem.device.type == "cpu" else as_graph(forward)
                return clock(call, 20)
            except Exception as refused:  # whatever compiler and driver raise for a tile too large
                logger.debug("%s: %s", tiling, refused)
                return None

        return evaluate


@torch.inference_mode()
def tune(
    problem: Problem, rows: tuple[int, ...], space: Space, clock: Clock, hip: bool, seconds: float
) -> tuple[LayerShape, tuple[Bucket, ...]]:
    """Tilings of one shape: (the shape as its file is named, one bucket per entry of ``rows``).

    A bucket starts from the one before it, which is near, and takes an even part of ``seconds``.
    """
    layer = Layer(problem, hip)
    buckets: list[Bucket] = []
    ends = time.monotonic() + seconds
    for index, count in enumerate(sorted(rows)):
        share = (ends - time.monotonic()) / (len(rows) - index)
        evaluate = layer.evaluator(count, clock)
        default = default_tiling(layer.shape, count, hip)
        started = evaluate(default)
        starts = [default] + ([buckets[-1].tiling] if buckets else [])
        deadline = time.monotonic() + share
        found = [search(start, space, evaluate, deadline) for start in starts]
        best = min((f for f in found if f is not None), key=lambda f: f.seconds, default=None)
        if best is None:
            logger.warning("%s: nothing runs at %d rows", layer.shape.name, count)
            continue
        buckets.append(
            Bucket(count, best.tiling, best.seconds * 1e6, (started or best.seconds) * 1e6)
        )
        logger.info(
            "%s, %d rows: %.1f us after %d tilings (rule: %.1f us)",
            layer.shape.name,
            count,
            best.seconds * 1e6,
            best.tried,
            (started or best.seconds) * 1e6,
        )
    return layer.shape, tuple(buckets)
