"""Metrics and stage timestamps of expert calls (:class:`ffn_worker.pipeline.Observer`)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from afd.config.resolve import Resolved
from afd.metrics.role import Direction, RoleMetrics, Stage
from afd.metrics.step_trace import NoTimestamps, StageTimestamps, StepTrace, new_timestamps
from afd.schedule import Position
from afd.topology import member_id
from afd.wire.streams_torch import HostStreams, Streams
from afd_comm import PeerTrace, Region
from ffn_worker.pool.calls import Call
from ffn_worker.stream_exchange import StreamCall


class HostObserver:
    """Counts every expert call of the host, and takes the stage timestamps of every
    ``metrics.stage_every``-th step."""

    def __init__(self, resolved: Resolved, metrics: RoleMetrics) -> None:
        layers = resolved.model.step_layers
        self._metrics = metrics
        self._first, self._last_layer = Position(layers[0], 0), layers[-1]
        self._answer_row_bytes = resolved.f2a.message_bytes(1)
        self._stage_every = resolved.deployment.metrics.stage_every
        self._timestamps: StageTimestamps = NoTimestamps()
        self._began_ns = 0
        self._started = 0.0
        self._free_since = time.monotonic()

    def working(self, call: Call) -> None:
        self._started = time.monotonic()
        if call.position == self._first:
            self._free_since = self._started  # idle time between steps is not a bubble
            self._began_ns = time.monotonic_ns()
            self._timestamps = new_timestamps(
                HostStreams(), sum(self._metrics.steps), self._stage_every
            )
            self._timestamps.begin()
        elif call.position.layer > self._last_layer:  # a draft layer is a step of its own
            self._free_since = self._started
        self._timestamps.working()

    def done(self, call: Call) -> None:
        rows, metrics = sum(call.rows), self._metrics
        if rows:
            metrics.stage(Stage.FFN).observe(time.monotonic() - self._started)
            metrics.bubble_seconds += self._started - self._free_since
            metrics.rows_per_ffn_call.observe(rows)
        self._timestamps.done(call.position.layer, call.position.micro_batch, rows)

    def answered(self, call: Call, counts: Sequence[int]) -> None:
        self._timestamps.copied()
        for sender, rows in zip(call.senders, counts, strict=True):
            if sender is not None:
                self._metrics.wire_bytes[Direction.F2A] += rows * self._answer_row_bytes
        self._free_since = time.monotonic()
        position = call.position
        if position.layer == self._last_layer and position.micro_batch + 1 == call.order.depth:
            self._end_step(call.order.depth)

    def _end_step(self, depth: int) -> None:
        self._timestamps.end()
        trace = self._timestamps.read(self._began_ns, replayed=False)
        if trace is not None:
            self._metrics.step_traces.add(trace)
        self._timestamps = NoTimestamps()
        self._metrics.steps[depth] += 1


class StreamObserver:
    """Takes the stage timestamps of a step on streams; every replay of its graph takes them
    anew."""

    def __init__(self, streams: Streams, stage_every: int) -> None:
        self._began_ns = time.monotonic_ns()
        self._timestamps = new_timestamps(streams, 0, stage_every)

    def begin(self) -> None:
        self._timestamps.begin()

    def working(self, call: StreamCall) -> None:
        self._timestamps.working()

    def done(self, call: StreamCall) -> None:
        self._timestamps.done(call.position.layer, call.position.micro_batch, sum(call.rows))

    def answered(self, call: StreamCall, counts: Sequence[int]) -> None:
        self._timestamps.copied()

    def end(self) -> None:
        self._timestamps.end()

    def launched(self) -> None:
        """The host is about to replay the step."""
        self._began_ns = time.monotonic_ns()

    def trace(self) -> StepTrace | None:
        """The timestamps of the last run, once it has ended."""
        return self._timestamps.read(self._began_ns, replayed=True)


class ReplayReports:
    """Makes the observers of steps on streams, and adds their timestamps to the metrics."""

    def __init__(self, resolved: Resolved, metrics: RoleMetrics) -> None:
        self._metrics = metrics
        self._stage_every = resolved.deployment.metrics.stage_every
        self._count = 0

    def observer(self, streams: Streams) -> StreamObserver:
        return StreamObserver(streams, self._stage_every)

    def report(self, observer: StreamObserver, rows: Callable[[], Sequence[int]]) -> None:
        """Adds a step that has ended; reads the timestamps of every ``stage_every``-th, because
        that takes microseconds for each of them.

        rows: returns the rows of each micro-batch; a graph only knows its bucket.
        """
        self._count += 1
        if self._stage_every and self._count % self._stage_every == 0:
            trace = observer.trace()
            if trace is not None:
                sent = rows()
                spans = [replace(span, rows=sent[span.micro_batch]) for span in trace.spans]
                self._metrics.note_replay(replace(trace, spans=tuple(spans)))


def trace_wire(resolved: Resolved, region: Region, metrics: RoleMetrics) -> None:
    """Has the transport measure the messages of each attention instance, if configured."""
    if not resolved.deployment.transport.trace:
        return
    for number in range(resolved.slots.attention_ranks):
        trace = PeerTrace()
        region.trace(resolved.slots.ffn_claim(number), trace)
        place = divmod(number, resolved.contract.attention_tp)
        metrics.wire_traces[member_id("attention", *place)] = trace
