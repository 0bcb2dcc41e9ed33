"""Metrics and stage timestamps of the steps of an attention instance.

The step tells an observer what it just did. Each call costs a clock read and a few additions: no
lock, no log line, and memory only in the steps that are traced (``metrics.stage_every``).
"""

from __future__ import annotations

import time

from afd.metrics.role import Direction, RoleMetrics, Stage
from afd.metrics.step_trace import NoTimestamps, StageTimestamps, new_timestamps
from afd.wire.streams_torch import HostStreams, StepTimer, Streams


class StepObserver:
    """Observes the steps that the host sends message by message."""

    def __init__(self, metrics: RoleMetrics, stage_every: int) -> None:
        self.metrics = metrics
        self._stage_every = stage_every
        self._ffn_ranks = 0
        self._attention = metrics.stage(Stage.ATTENTION)
        self._timestamps: StageTimestamps = NoTimestamps()
        self._steps = 0
        self._depth = 1
        self._counted = True
        self._began_ns = 0
        self._working_since = time.monotonic()
        self._waiting_since = 0.0

    def connected(self, ffn_ranks: int) -> None:
        """From now on every micro-batch goes to so many FFN ranks."""
        in_flight = self.metrics.slots_in_flight // max(1, self._ffn_ranks)
        self.metrics.slots_in_flight = in_flight * ffn_ranks
        self._ffn_ranks = self.metrics.peers_up = ffn_ranks

    def begin_step(self, depth: int, *, draft: bool) -> None:
        """draft: one draft layer; neither counted nor traced as a step."""
        self._working_since = time.monotonic()
        self._counted = not draft
        if draft:
            self._timestamps = NoTimestamps()
            return
        self._depth = depth
        self._steps += 1
        self._timestamps = new_timestamps(HostStreams(), self._steps, self._stage_every)
        self._began_ns = time.monotonic_ns()
        self._timestamps.begin()

    def end_step(self) -> None:
        if not self._counted:
            return
        self._timestamps.end()
        trace = self._timestamps.read(self._began_ns, replayed=False)
        if trace is not None:
            self.metrics.step_traces.add(trace)
        self.metrics.steps[self._depth] += 1

    def computed(self, layer: int, micro_batch: int, rows: int) -> None:
        """The attention half of this position is done; its rows are about to be sent."""
        self._attention.observe(time.monotonic() - self._working_since)
        self._timestamps.done(layer, micro_batch, rows)
        self.metrics.slots_in_flight += self._ffn_ranks

    def posted(self, nbytes: int) -> None:
        """So many bytes were posted to FFN ranks, now or on a GPU stream."""
        self.metrics.wire_bytes[Direction.A2F] += nbytes

    def sent(self) -> None:
        """The message of the last position is out."""
        self._timestamps.copied()
        self._working_since = time.monotonic()

    def waiting(self) -> None:
        """The step waits for the answers to a micro-batch."""
        self._waiting_since = time.monotonic()

    def working(self) -> None:
        """All answers to the micro-batch are here."""
        self._working_since = time.monotonic()
        self.metrics.bubble_seconds += self._working_since - self._waiting_since
        self._timestamps.working()
        self.metrics.slots_in_flight -= self._ffn_ranks

    def resumed(self, cause: str) -> None:
        """A lost FFN rank is back; its unanswered micro-batches are sent again.

        cause: see :class:`afd.metrics.role.RoleMetrics`.
        """
        self.metrics.ffn_retries[cause] += 1


class ReplayObserver:
    """Observes the steps that a GPU replays as a graph."""

    def __init__(self, metrics: RoleMetrics, stage_every: int, timer: StepTimer) -> None:
        self._metrics = metrics
        self._stage_every = stage_every
        self._replays = 0
        self._began_ns = 0
        self._timer = timer

    def new_timestamps(self, streams: Streams) -> StageTimestamps:
        """Stage timestamps for a step about to be captured; each replay records them again."""
        return new_timestamps(streams, 0, self._stage_every)

    def begin(self) -> None:
        """A replay is about to be queued."""
        self._began_ns = time.monotonic_ns()
        self._timer.begin()

    def queued(self) -> None:
        self._timer.end()

    def finished(self, timestamps: StageTimestamps, depth: int) -> None:
        """The last replay is complete.

        Its stage timestamps are read in every ``stage_every``-th replay only: each one costs
        microseconds.
        """
        self._metrics.graph_steps[depth] += 1
        self._metrics.graph_seconds[depth] += self._timer.seconds()
        self._replays += 1
        if self._stage_every and self._replays % self._stage_every == 0:
            trace = timestamps.read(self._began_ns, replayed=True)
            if trace is not None:
                self._metrics.note_replay(trace)
