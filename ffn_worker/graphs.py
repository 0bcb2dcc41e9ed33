"""Announced steps: their graphs, and how they run.

A graph does not depend on who takes part in a step (:mod:`ffn_worker.stream_exchange`), so there is
one per bucket of rows and depth (:mod:`afd.graph_sizes`). All are captured before the rank is
ready, and none is captured again. A step that is larger than every graph runs on the host
(:mod:`ffn_worker.announced_host`).
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from afd.devices import device_of_torch
from afd.graph_sizes import GraphSizes
from afd.metrics.role import Captured, RoleMetrics
from afd.wire.streams_torch import runtime_of, synchronize
from afd_comm import Status, StepPlan
from ffn_worker.announced_host import AnnouncedHost
from ffn_worker.observers import ReplayReports, StreamObserver
from ffn_worker.pipeline import Pipeline
from ffn_worker.pool.calls import Call, Sender
from ffn_worker.pool.peers import Peer
from ffn_worker.stream_exchange import StepShape, StreamExchange

logger = logging.getLogger("afd.ffn")

Step = Callable[[], StreamObserver]
"""Gives a step to the streams; returns its observer."""


class Recorder(Protocol):
    """Turns a step into something that can run again."""

    def capture(self, step: Step) -> Step: ...


class EachTime:
    """Enqueues the step anew each time: on device cpu, and for backends without graphs."""

    def capture(self, step: Step) -> Step:
        return step


class DeviceGraphs:
    """Captures steps as graphs of a device. They share their memory, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = runtime_of(device)
        self._memory = self._runtime.graph_memory()

    def capture(self, step: Step) -> Step:
        observer, launch = self._runtime.capture(self._device, step, self._memory)

        def replay() -> StreamObserver:
            observer.launched()
            launch()
            return observer

        return replay


@dataclass(frozen=True)
class Graph:
    """A step of one shape. plan: what it sends. run: gives it to the streams."""

    plan: StepPlan
    run: Step


class StreamSteps:
    """Captures the graphs of this rank and runs announced steps.

    exchange, reports: of all steps. recorder: turns a step into what runs it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        exchange: StreamExchange,
        on_host: AnnouncedHost,
        reports: ReplayReports,
        metrics: RoleMetrics,
        sizes: GraphSizes,
        late_us: int,
    ) -> None:
        """late_us: how long a step may wait for a request, microseconds."""
        self._pipeline = pipeline
        self.exchange = exchange
        self._on_host = on_host
        self.reports = reports
        self._metrics = metrics
        self._sizes = sizes
        self._late_us = late_us
        device = pipeline.model.device
        captures = pipeline.capturable and device_of_torch(device.type).captures_graphs
        self.recorder: Recorder = DeviceGraphs(device) if captures else EachTime()
        self._graphs: dict[StepShape, Graph] = {}
        self._greeted: dict[int, Peer] = {}
        self._last_senders: Sequence[Sender | None] = ()
        self._phase = Captured.START

    def capture_all(self) -> None:
        """Captures every graph. All ranks of an FFN instance do so in the same order, because they
        add up in the call before each capture.

        Raises:
            PeerLost, DeadlineExceeded: a rank of this instance did not keep up.
        """
        began = time.monotonic()
        self.exchange.allocate(self._sizes.largest)
        for bucket, depth in self._sizes.all():
            self._capture(StepShape(bucket, depth))
        self._phase = Captured.AFTER
        logger.info("%d graphs captured in %.1f s", len(self._graphs), time.monotonic() - began)

    def run(self, step: Call) -> list[tuple[Peer, Status]]:
        """Runs one announced step; returns the peers that did not keep up, and how.

        What these peers received in this step is garbage.

        Raises:
            PeerLost, DeadlineExceeded: a rank of this instance did not keep up.
        """
        graph = self._graphs.get(StepShape(step.order.bucket, step.order.depth))
        if graph is None:
            return self._on_host.run(step)
        exchange, table = self.exchange, self.exchange.table
        self._greet(step.senders)
        table.fill(step.order.parts, step.senders)
        exchange.begin_answers(graph.plan, self._late_us)
        try:
            observer = graph.run()
        except BaseException:
            exchange.gate.cancel()
            raise
        failed = exchange.wait_for_step()
        self._pipeline.reduce.check()
        self._metrics.steps[step.order.depth] += 1
        if not failed:
            self.reports.report(observer, table.rows_of_step)
            return []
        peers = [sender.peer for sender in step.senders if sender is not None]
        return [(peer, failed[peer.index]) for peer in peers if peer.index in failed]

    def forget_all_but(self, peers: Sequence[Peer]) -> None:
        """Frees the links of ended sessions."""
        staying = {id(peer) for peer in peers}
        for index, peer in list(self._greeted.items()):
            if id(peer) not in staying:
                self.exchange.gate.clear_peer(index)
                del self._greeted[index]
                self._last_senders = ()

    def _greet(self, senders: Sequence[Sender | None]) -> None:
        if senders is self._last_senders:  # most steps: the same take part
            return
        for sender in senders:
            if sender is not None and self._greeted.get(sender.peer.index) is not sender.peer:
                self.exchange.greet(sender.peer)
                self._greeted[sender.peer.index] = sender.peer
        self._last_senders = senders

    def _capture(self, shape: StepShape) -> None:
        self._warm_up(shape)
        run = self.recorder.capture(partial(self._record, shape))
        self._graphs[shape] = Graph(self.exchange.plan(shape), run)
        self._metrics.graph_captures[self._phase] += 1

    def _warm_up(self, shape: StepShape) -> None:
        """Compiles and loads the kernels of this shape before it is captured: inside a capture, or
        behind a wait, the driver would wait for an idle device (comm/README.md)."""
        exchange, slots = self.exchange, self.exchange.slots
        rows = next(exchange.calls(shape)).rows
        exchange.table.load()
        slots.read_bucket(0, shape.bucket, exchange.table.of(0))
        out = self._pipeline.model.warm_up(sum(rows), slots.request_layout.tag)
        sums, _ = self._pipeline.reduce.reduce_scatter(out, rows)
        slots.encode(sums).copy_to(exchange.send_memory[0])
        synchronize(out.device)
        self._pipeline.reduce.check()

    def _record(self, shape: StepShape) -> StreamObserver:
        """Enqueues all expert calls of a step."""
        exchange, observer = self.exchange, self.reports.observer(self.exchange.streams)
        observer.begin()
        exchange.begin_step(shape.depth)
        self._pipeline.run(exchange.calls(shape), exchange, observer)
        exchange.end_step()
        observer.end()
        return observer
