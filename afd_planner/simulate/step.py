"""One step of all instances, vectorised: the fast path of the simulator.

The FFN is a barrier at every (layer, micro-batch). A step is therefore a fixed sequence of stages
whose times are sums and maxima of earlier times, computed for all instances of a pool at once.
:mod:`afd_planner.simulate.events` computes the same message by message with an event queue; a test
compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afd_planner.cost.interpolate import Array
from afd_planner.simulate.links import Receivers, drained, drained_each

Index = NDArray[np.intp]


@dataclass(frozen=True)
class Outage:
    """FFN instance ``ffn`` is down in [start, end) and then receives unanswered requests again.

    ``resend``: seconds from ``end`` until the pending micro-batch has arrived again.
    """

    ffn: int
    start: float
    end: float
    resend: float


@dataclass(frozen=True)
class StepInput:
    """Times of the parts of a step. L layers, d micro-batches, x attention and y FFN instances.

    All times are seconds. Arrays may be read-only broadcasts.

    Attributes:
        start: [x] moment at which an attention instance starts.
        rows: [d, x]; 0 if an instance does not have the micro-batch.
        attention: [L, d, x] computing time.
        ffn: [L, d, y] computing time.
        out_burst: [L, d, x] time that an attention instance's link needs to send all its requests.
        out_each: [d, x] time that an FFN instance's link needs to receive one request.
        back_burst: [L, d, y] time that an FFN instance's link needs to send all its answers.
        back_each: [d, x] time that an attention instance's link needs to receive one answer.
        out_latency: [L, d, x] latency of requests.
        back_latency: [L, d, y] latency of answers.
        outages: Outages of FFN instances, in any order.
        deaths: Attention instance to the moment at which it dies.
        detect: Time from a death until the FFN stops waiting for the instance.
        ffn_from: The FFN starts nothing before this moment, because it waits for an instance that
            died between two steps.
    """

    start: Array
    rows: Array
    attention: Array
    ffn: Array
    out_burst: Array
    out_each: Array
    back_burst: Array
    back_each: Array
    out_latency: Array
    back_latency: Array
    outages: Sequence[Outage] = ()
    deaths: Mapping[int, float] = field(default_factory=dict)
    detect: float = 0.0
    ffn_from: float = -np.inf


@dataclass(frozen=True)
class StepSpans:
    """Begin and end of every stage: [2, L, d, x] or [2, L, d, y]; NaN if it did not run."""

    attention: Array
    out: Array
    ffn: Array
    back: Array


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        end: [x] moment of the last answer at each attention instance; NaN if it died.
        ffn_start, ffn_end: First begin and last end of computing in the FFN pool.
        attention_busy: [x] seconds of computing.
        ffn_busy: [y] seconds of computing.
        spans: Set if ``run_step`` was called with ``spans=True``.
    """

    end: Array
    ffn_start: float
    ffn_end: float
    attention_busy: Array
    ffn_busy: Array
    spans: StepSpans | None


def run_step(given: StepInput, *, spans: bool = False) -> StepResult:
    """Runs all stages of a step, in the order of :func:`afd.schedule.walk`."""
    layers, depth, x = given.attention.shape
    y = given.ffn.shape[2]
    a_free, a_tx, a_rx = given.start.copy(), given.start.copy(), given.start.copy()
    f_free, f_tx = np.full(y, given.ffn_from), np.full(y, -np.inf)
    f_rx = -np.inf
    answered = np.tile(given.start, (depth, 1))
    a_busy, f_busy = np.zeros(x), np.zeros(y)
    ffn_start = np.inf
    taking_part = [np.flatnonzero(given.rows[mb]) for mb in range(depth)]
    receivers = [Receivers.of(given.back_each[mb, who]) for mb, who in enumerate(taking_part)]
    dead: set[int] = set()
    rec = _Recorder(layers, depth, x, y) if spans else None
    for layer in range(layers):
        for mb in range(depth):
            who = taking_part[mb]
            if who.size == 0:
                continue
            begin = np.maximum(a_free[who], answered[mb, who])
            took = given.attention[layer, mb, who]
            end = begin + took
            gone_at = -np.inf
            died = [i for i, at in given.deaths.items() if i not in dead and i in who]
            for i in died:
                if end[np.searchsorted(who, i)] > given.deaths[i]:
                    dead.add(i)
                    gone_at = max(gone_at, given.deaths[i] + given.detect)
            if gone_at > -np.inf:
                keep = ~np.isin(who, list(dead))
                begin, took, end = begin[keep], took[keep], end[keep]
                taking_part = [w[~np.isin(w, list(dead))] for w in taking_part]
                receivers = [Receivers.of(given.back_each[i, w]) for i, w in enumerate(taking_part)]
                who = taking_part[mb]
                if who.size == 0:
                    continue
            a_free[who] = end
            a_busy[who] += took
            sent = np.maximum(end, a_tx[who])
            left = sent + given.out_burst[layer, mb, who]
            a_tx[who] = left
            latency = given.out_latency[layer, mb, who]
            f_rx = drained(sent + latency, given.out_each[mb, who], f_rx)
            arrived = max(f_rx, float((left + latency).max()), gone_at)

            called = np.maximum(f_free, arrived)
            worked = given.ffn[layer, mb]
            returned = called + worked
            for outage in given.outages:
                j = outage.ffn
                if called[j] < outage.end and returned[j] > outage.start:
                    called[j] = outage.end + outage.resend
                    returned[j] = called[j] + worked[j]
            f_free = returned
            f_busy += worked
            ffn_start = min(ffn_start, float(called.min()))
            posted = np.maximum(returned, f_tx)
            f_tx = posted + given.back_burst[layer, mb]
            latency = given.back_latency[layer, mb]
            a_rx[who] = drained_each(posted + latency, receivers[mb], a_rx[who])
            answered[mb, who] = np.maximum(a_rx[who], float((f_tx + latency).max()))
            if rec is not None:
                rec.put(layer, mb, who, (begin, end), (sent, left), (called, returned))
                rec.put_back(layer, mb, posted, f_tx)
    finish = answered.max(axis=0)
    if dead:
        finish[list(dead)] = np.nan
    last = float(f_free.max())
    return StepResult(finish, ffn_start, last, a_busy, f_busy, rec.spans if rec else None)


class _Recorder:
    def __init__(self, layers: int, depth: int, x: int, y: int) -> None:
        def empty(count: int) -> Array:
            return np.full((2, layers, depth, count), np.nan)

        self.spans = StepSpans(empty(x), empty(x), empty(y), empty(y))

    def put(
        self,
        layer: int,
        mb: int,
        who: Index,
        attention: tuple[Array, Array],
        out: tuple[Array, Array],
        ffn: tuple[Array, Array],
    ) -> None:
        self.spans.attention[:, layer, mb, who] = attention
        self.spans.out[:, layer, mb, who] = out
        self.spans.ffn[:, layer, mb] = ffn

    def put_back(self, layer: int, mb: int, posted: Array, left: Array) -> None:
        self.spans.back[:, layer, mb] = posted, left
