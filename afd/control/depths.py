"""Chooses the depth per bucket of decode steps from measured step times (``pipeline.depth: auto``).

It takes the reports of members and returns the depths to run at."""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass, field

from afd.control.messages import Work
from afd.depth import AUTO, choose, worth_trying

WINDOW_STEPS = 8
WINDOWS = 3
"""A depth's step time is the median of this many means of at least ``WINDOW_STEPS`` steps each."""
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 960.0
"""Limits of the pause between two rounds of one bucket; it doubles if a round changed nothing."""
DRIFT = 0.25
"""A bucket is measured again before its pause ends if its step time changed by this share: contexts
grow, so another depth may be best now."""
_GIVE_UP_S = 5.0
_GIVE_UP_REPORTS = 10

_log = logging.getLogger(__name__)


class _Windows:
    """The last WINDOWS means of at least WINDOW_STEPS steps each."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._steps, self._seconds = 0, 0.0

    def add(self, steps: int, seconds: float) -> None:
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if self._steps >= WINDOW_STEPS:
            self._means = [*self._means, self._seconds / self._steps][-WINDOWS:]
            self._steps, self._seconds = 0, 0.0

    @property
    def median(self) -> float | None:
        """Seconds per step; None while there are too few windows."""
        return statistics.median(self._means) if len(self._means) == WINDOWS else None


@dataclass
class _Bucket:
    """depth: chosen. step_s: its step time in the last round, which ended at ``ended``.
    due: earliest start of the next round; pause: seconds from its end to the round after it."""

    depth: int
    due: float
    ended: float = 0.0
    pause: float = FIRST_PAUSE_S
    step_s: float | None = None
    recent: _Windows = field(default_factory=_Windows)


@dataclass
class _Round:
    """Measures the depths of one bucket one after the other, beginning with the current one.

    sides: seconds of work and of waiting since the round began, by member."""

    rows: int
    to_visit: list[int]
    heard: float
    windows: _Windows = field(default_factory=_Windows)
    found: dict[int, float] = field(default_factory=dict)
    sides: dict[str, tuple[float, float]] = field(default_factory=dict)
    elsewhere: int = 0  # consecutive reports of steps at another depth


@dataclass(frozen=True)
class DepthPolicy:
    """The configured policy. auto: measured step times choose the depth. target_s: wanted time per
    output token; see :func:`afd.depth.choose`."""

    auto: bool
    target_s: float | None = None


FIXED_DEPTH = DepthPolicy(auto=False)


class DepthTuner:
    """Measures one bucket at a time, so that rounds do not influence each other."""

    def __init__(self, policy: DepthPolicy) -> None:
        self._policy = policy
        self._target_s = policy.target_s
        self._buckets: dict[int, _Bucket] = {}
        self._round: _Round | None = None
        self._last: dict[str, tuple[int, Work]] = {}

    def chooses(self, wanted: int | None) -> bool:
        """Whether the tuner chooses the depth. wanted: by the operator; None: as configured."""
        return self._policy.auto if wanted is None else wanted == AUTO

    @property
    def depths(self) -> tuple[tuple[int, int], ...]:
        """Returns (bucket, depth) pairs to run at from now on, for all buckets seen so far."""
        found = {rows: bucket.depth for rows, bucket in self._buckets.items()}
        if self._round is not None:
            found[self._round.rows] = self._round.to_visit[0]
        return tuple(sorted(found.items()))

    def adopt(self, depths: tuple[tuple[int, int], ...], now: float) -> None:
        """Continues with the depths that an earlier run of the control plane published."""
        self._buckets = {rows: _Bucket(depth, now) for rows, depth in depths}

    def note(
        self, member: str, generation: int, work: Work, now: float, max_depth: int | None
    ) -> None:
        """Takes a member's totals since its start.

        Args:
            max_depth: deepest depth to try; None: the tuner does not choose the depth.
        """
        known, last = self._last.get(member, (0, work))
        self._last[member] = (generation, work)
        if max_depth is None:
            self._round = None
            return
        if known != generation:
            return
        if self._round is not None:
            busy, waited = self._round.sides.get(member, (0.0, 0.0))
            busy, waited = busy + work.busy_s - last.busy_s, waited + work.waited_s - last.waited_s
            self._round.sides[member] = (busy, waited)
        before = {(past.rows, past.depth): past for past in last.steps}
        for s in work.steps:
            past = before.get((s.rows, s.depth))
            steps = s.steps - (past.steps if past else 0)
            seconds = s.seconds - (past.seconds if past else 0.0)
            if steps > 0:
                self._steps(s.rows, s.depth, steps, seconds, now, max_depth)

    def _steps(
        self, rows: int, depth: int, steps: int, seconds: float, now: float, max_depth: int
    ) -> None:
        bucket = self._buckets.setdefault(rows, _Bucket(depth, now))
        if self._round is not None and now - self._round.heard > _GIVE_UP_S:
            self._give_up(now)  # no steps of that bucket run any more
        seen_for_long = bucket.recent.median is not None  # batches may still fill up
        if self._round is None and now >= bucket.due and seen_for_long:
            others = [d for d in range(1, max_depth + 1) if d != depth]
            bucket.depth, self._round = depth, _Round(rows, [depth, *others], now)
        if self._round is not None and self._round.rows == rows:
            self._visit(self._round, depth, steps, seconds, now)
        elif depth == bucket.depth:
            self._watch(bucket, steps, seconds, now)

    def _visit(self, tried: _Round, depth: int, steps: int, seconds: float, now: float) -> None:
        tried.heard = now
        if depth != tried.to_visit[0]:
            # Reported before the member knew, or its steps have too few rows for this depth.
            tried.elsewhere += 1
            if tried.elsewhere >= _GIVE_UP_REPORTS:
                self._next(tried, now)
            return
        tried.elsewhere = 0
        tried.windows.add(steps, seconds)
        median = tried.windows.median
        if median is None:
            return
        tried.found[depth] = median
        if len(tried.found) == 1:
            waited = [w / (b + w) for b, w in tried.sides.values() if b > 0]
            rest = [d for d in tried.to_visit[1:] if worth_trying(depth, d, waited)]
            tried.to_visit = [depth, *rest]
        self._next(tried, now)

    def _next(self, tried: _Round, now: float) -> None:
        tried.windows, tried.elsewhere = _Windows(), 0
        if len(tried.to_visit) > 1:
            tried.to_visit.pop(0)
            return
        current = self._buckets[tried.rows].depth
        if current not in tried.found:
            self._give_up(now)
            return
        self._choose(tried, now)

    def _choose(self, tried: _Round, now: float) -> None:
        bucket = self._buckets[tried.rows]
        choice = choose(bucket.depth, tried.found, self._target_s)
        times = ", ".join(f"{d}: {s * 1e3:.2f} ms" for d, s in sorted(tried.found.items()))
        level = logging.INFO if choice.depth != bucket.depth else logging.DEBUG
        _log.log(
            level, "depth %d -> %d for decode steps of up to %d rows: %s (%s%s)",
            bucket.depth, choice.depth, tried.rows, choice.reason, times,
            "" if self._target_s is None else f"; target {self._target_s * 1e3:g} ms",
        )  # fmt: skip
        pause = FIRST_PAUSE_S if choice.depth != bucket.depth else bucket.pause
        self._buckets[tried.rows] = _Bucket(
            choice.depth,
            due=now + pause,
            ended=now,
            pause=min(2 * pause, LONGEST_PAUSE_S),
            step_s=tried.found[choice.depth],
        )
        self._round = None

    def _give_up(self, now: float) -> None:
        assert self._round is not None
        bucket = self._buckets[self._round.rows]
        bucket.due, bucket.ended = now + FIRST_PAUSE_S, now
        self._round = None

    def _watch(self, bucket: _Bucket, steps: int, seconds: float, now: float) -> None:
        """Makes the next round due if the step time has changed."""
        bucket.recent.add(steps, seconds)
        recent, known, target = bucket.recent.median, bucket.step_s, self._target_s
        if recent is None or known is None or now < bucket.ended + FIRST_PAUSE_S:
            return
        missed = target is not None and recent > target >= known
        if missed or abs(recent / known - 1) > DRIFT:
            bucket.due = now
