"""Accumulates the steps of a simulation into its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from afd_planner.cost.interpolate import Array
from afd_planner.simulate.result import (
    FailureImpact,
    Quantiles,
    RequestCounts,
    Result,
    TracedStep,
)
from afd_planner.simulate.spec import Spec
from afd_planner.simulate.step import StepInput, StepResult
from afd_planner.simulate.workload import Counts


@dataclass(frozen=True)
class Latencies:
    """Per request, arrays of any length: see the fields of Result with these names."""

    tpot: Array = field(default_factory=lambda: np.zeros(0))
    ttft: Array = field(default_factory=lambda: np.zeros(0))
    e2el: Array = field(default_factory=lambda: np.zeros(0))
    engine_ttft: Array = field(default_factory=lambda: np.zeros(0))
    queued: Array = field(default_factory=lambda: np.zeros(0))
    waiting: Quantiles = field(default_factory=Quantiles)
    running: Quantiles = field(default_factory=Quantiles)


class Tally:
    """Sums over the steps of one simulation."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.timeline: list[TracedStep] = []
        self._attention_busy = self._attention_in_step = 0.0
        self._ffn_busy = self._ffn_in_step = 0.0
        self._wire_out = self._wire_back = 0.0
        self._bounds: list[tuple[float, float, float]] = []  # first begin, last begin, last end
        self._gaps: list[Array] = []
        self._weights: list[Array] = []

    def add(
        self,
        number: int,
        instances: Sequence[int],
        given: StepInput,
        done: StepResult,
        end: Array,
        tokens: Counts,
    ) -> None:
        """Adds one step.

        Args:
            instances: [x] participating attention instances.
            end: [x] seconds at which their tokens were complete; NaN if they died.
            tokens: [x] tokens produced.
        """
        alive = np.isfinite(end)
        self.steps += 1
        self.tokens += int(tokens[alive].sum())
        last = float(end[alive].max()) if alive.any() else float(given.start.max())
        self._bounds.append((float(given.start.min()), float(given.start.max()), last))
        busy = done.attention_busy
        self._attention_busy += float(busy.sum())
        self._attention_in_step += float(np.where(alive, done.end - given.start, busy).sum())
        if done.ffn_busy.any():
            self._ffn_busy += float(done.ffn_busy.sum())
            self._ffn_in_step += (done.ffn_end - done.ffn_start) * done.ffn_busy.size
        self._wire_out += float(given.out_burst.sum(where=(given.rows > 0)[None]))
        self._wire_back += float(given.back_burst.sum())
        if done.spans is not None:
            self.timeline.append(TracedStep(number, tuple(instances), done.spans))

    def stall(self, begin: float, end: float) -> float:
        """Returns the excess over the median of the longest step that overlaps [begin, end]."""
        lengths = self._lengths()
        hit = [
            length
            for length, (first, _, last) in zip(lengths, self._bounds, strict=True)
            if first <= end and last >= begin
        ]
        return max(0.0, max(hit) - float(np.median(lengths))) if hit else 0.0

    def _lengths(self) -> Array:
        return np.array([end - begun for _, begun, end in self._bounds])

    def gaps(self, seconds: Array, tokens: Array | Counts) -> None:
        """Adds ``tokens`` [n] tokens that came ``seconds`` [n] after their predecessors."""
        some = tokens > 0
        if some.any():
            self._gaps.append(seconds[some])
            self._weights.append(tokens[some].astype(float))

    def _itl(self) -> Quantiles:
        if not self._gaps:
            return Quantiles()
        return quantiles(np.concatenate(self._gaps), np.concatenate(self._weights))

    def result(
        self,
        spec: Spec,
        seed: int,
        *,
        latencies: Latencies,
        requests: RequestCounts,
        failures: Sequence[FailureImpact],
    ) -> Result:
        elapsed = 0.0
        if self._bounds:
            elapsed = max(b[2] for b in self._bounds) - min(b[0] for b in self._bounds)
        rate = self.tokens / elapsed if elapsed else 0.0
        x, y = spec.attention.instances, spec.ffn.instances
        return Result(
            name=spec.name,
            seed=seed,
            gpus=spec.gpus,
            steps=self.steps,
            elapsed_s=elapsed,
            tokens=self.tokens,
            tokens_per_s=rate,
            tokens_per_s_per_gpu=rate / spec.gpus,
            step=quantiles(self._lengths()),
            itl=self._itl(),
            tpot=quantiles(latencies.tpot),
            ttft=quantiles(latencies.ttft),
            e2el=quantiles(latencies.e2el),
            engine_ttft=quantiles(latencies.engine_ttft),
            queued=quantiles(latencies.queued),
            waiting=latencies.waiting,
            running=latencies.running,
            attention_busy=_share(self._attention_busy, elapsed * x),
            ffn_busy=_share(self._ffn_busy, elapsed * y),
            attention_bubble=_share(
                self._attention_in_step - self._attention_busy, self._attention_in_step
            ),
            ffn_bubble=_share(self._ffn_in_step - self._ffn_busy, self._ffn_in_step),
            wire_out=_share(self._wire_out, elapsed * x),
            wire_back=_share(self._wire_back, elapsed * y),
            requests=requests,
            failures=tuple(failures),
            timeline=tuple(self.timeline),
        )


def quantiles(values: Array, weights: Array | None = None) -> Quantiles:
    """Returns the mean and the quantiles; the quantiles are elements of ``values``."""
    if values.size == 0:
        return Quantiles()
    order = np.argsort(values)
    ranked = values[order]
    counted = np.ones(values.size) if weights is None else weights[order]
    cumulated = np.cumsum(counted)
    mean = float(ranked @ counted / cumulated[-1]) if cumulated[-1] else 0.0
    at = np.searchsorted(cumulated, np.array([0.5, 0.9, 0.99]) * cumulated[-1] * (1 - 1e-12))
    p50, p90, p99 = ranked[np.minimum(at, values.size - 1)]
    return Quantiles(mean, float(p50), float(p90), float(p99), float(ranked[-1]))


def level(begin: Array, end: Array, since: float, until: float) -> Quantiles:
    """Returns how many requests are in a state, over the time from ``since`` to ``until``, seconds.

    begin, end: [n] seconds at which each entered and left the state; NaN if it did not, so far.
    """
    entered, left = begin[np.isfinite(begin)], end[np.isfinite(end)]
    moments = np.concatenate([entered, left])
    order = np.argsort(moments, kind="stable")
    changes = np.concatenate([np.ones(entered.size), -np.ones(left.size)])[order]
    edges = np.clip(np.concatenate([moments[order], [until]]), since, until)
    lasts = np.diff(edges)
    return quantiles(np.cumsum(changes)[lasts > 0], lasts[lasts > 0])


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else 0.0
