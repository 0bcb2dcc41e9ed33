"""Decides when a step on GPU streams is recorded as a graph, and when its graph is replayed.

The attention side announces such a step and the leader orders it. All its waits, expert calls, sums
over ranks and answers are then on streams (:mod:`ffn_worker.stream_exchange`), and the host only
watches that the step ends (afd_comm's guard).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from afd.devices import device_of_torch
from afd.wire.streams_torch import runtime_of
from afd_comm import Status
from ffn_worker.observers import ReplayReports, StreamObserver
from ffn_worker.pipeline import Pipeline
from ffn_worker.pool.calls import Call
from ffn_worker.pool.peers import Peer
from ffn_worker.stream_exchange import (
    StepPeer,
    StreamExchange,
    Waits,
    step_depth,
    step_peers,
    taking_part,
)

logger = logging.getLogger("afd.ffn")

Shape = tuple[tuple[int, int, int, int], ...]
"""Per attention instance of a step: its index, session, rows and depth."""


@dataclass(frozen=True)
class _Recording:
    """A step as the streams know it. replay: None if it was enqueued and not captured."""

    waits: Waits
    observer: StreamObserver
    replay: Callable[[], None] | None = None


class StreamSteps:
    """Captures each shape of step when it first runs, and replays its graph from then on.

    On device cpu, and with a backend that cannot be captured, every step is enqueued anew.
    """

    def __init__(
        self, pipeline: Pipeline, exchange: StreamExchange, reports: ReplayReports, late_us: int
    ) -> None:
        """late_us: how long a step may wait for an attention instance, microseconds."""
        self._pipeline = pipeline
        self._exchange = exchange
        self._reports = reports
        self._late_us = late_us
        self._captures = (
            pipeline.capturable and device_of_torch(pipeline.model.device.type).captures_graphs
        )
        self._warm: set[tuple[int, ...]] = set()
        self._graphs: dict[Shape, _Recording] = {}

    def run(self, call: Call) -> list[tuple[Peer, Status]]:
        """Runs one announced step; returns the peers that did not keep up, and how.

        The guard releases the waits for a peer that is gone at once, and for one that is late after
        ``late_us``. What these peers received in this step is garbage.

        Raises:
            PeerLost, DeadlineExceeded: a rank of this instance did not keep up.
        """
        step = self._launch(step_peers(call))
        statuses = self._exchange.guard(step.waits).wait(self._late_us)
        self._pipeline.reduce.check()
        failed: dict[str, tuple[Peer, Status]] = {}
        for peer, status in zip(step.waits.peers, statuses, strict=True):
            if status != Status.OK and peer is not None:
                failed[peer.id] = (peer, status)
        if not failed:
            self._reports.report(step.observer)
        return list(failed.values())

    def drop_graphs_except(self, sessions: set[int]) -> None:
        """Drops the graphs of other sessions: a graph holds the doorbells of its sessions."""
        ended = [shape for shape in self._graphs if not {s for _, s, _, _ in shape} <= sessions]
        for shape in ended:
            del self._graphs[shape]

    def _launch(self, peers: Sequence[StepPeer]) -> _Recording:
        if not self._captures:
            self._warm_up(peers)
            return self._record(peers)
        shape = tuple((p.attention, p.session, p.rows, p.depth) for p in peers)
        step = self._graphs.get(shape)
        if step is None:
            step = self._graphs[shape] = self._capture(peers)
            who = [(f"attention-{p.attention}", p.rows, p.depth) for p in peers]
            logger.info("captured a step of %s", who)
        assert step.replay is not None
        step.observer.launched()
        step.replay()
        return step

    def _warm_up(self, peers: Sequence[StepPeer]) -> None:
        """Compiles and loads the kernels of these shapes before the step is enqueued: inside a
        capture, or behind a wait, the driver would wait for an idle device (comm/README.md)."""
        slots = self._exchange.slots
        for micro_batch in range(step_depth(peers)):
            present, counts = taking_part(peers, micro_batch)
            rows = tuple(counts)
            if rows not in self._warm:
                slots.read(self._exchange.request_slots(present, micro_batch), rows)
                out = self._pipeline.model.warm_up(sum(rows), slots.request_layout.tag)
                sums, _ = self._pipeline.reduce.reduce_scatter(out, rows)
                slots.encode(sums)
                self._warm.add(rows)

    def _capture(self, peers: Sequence[StepPeer]) -> _Recording:
        self._warm_up(peers)
        device = self._pipeline.model.device
        step, replay = runtime_of(device).capture(device, lambda: self._record(peers))
        return _Recording(step.waits, step.observer, replay)

    def _record(self, peers: Sequence[StepPeer]) -> _Recording:
        """Enqueues all expert calls of the step."""
        exchange, observer = self._exchange, self._reports.observer(self._exchange.streams)
        observer.begin()
        waits = exchange.begin_step()
        self._pipeline.run(exchange.calls(peers), exchange, observer)
        exchange.end_step()
        observer.end()
        return _Recording(waits, observer)
