"""The loop of an FFN rank: from a source of calls to the pipeline.

All FFN ranks of the deployment, the pool, run the same calls in the same order. The leader decides
them (:mod:`ffn_worker.pool.leader`); heads and followers execute its orders
(:mod:`ffn_worker.pool.follower`). Each process passes an order on before it runs the call.

A call is one of two things: an expert call, whose messages the host handles, or a whole step that
attention instances have *announced*. The messages of an announced step are handled by GPU streams,
and its graph is *replayed* once it has been captured (:mod:`ffn_worker.graphs`).
"""

from collections.abc import Iterator

import torch

from afd.errors import PeerLost
from afd.graph_sizes import GraphSizes
from afd.wire.layout import Kind
from afd.wire.streams_torch import make_streams
from ffn_worker.announced_host import AnnouncedExchange, AnnouncedHost
from ffn_worker.call_watchdog import CallClock
from ffn_worker.experts.moves import ExpertMoves
from ffn_worker.graphs import StreamSteps
from ffn_worker.host_exchange import HostExchange
from ffn_worker.membership import Membership
from ffn_worker.observers import HostObserver, ReplayReports, trace_wire
from ffn_worker.pipeline import Pipeline
from ffn_worker.pool.calls import Call
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.peers import PeerTable
from ffn_worker.pool.source import make_source
from ffn_worker.rank import FfnRank
from ffn_worker.rank_reduce import RankReduce
from ffn_worker.slots import RankSlots
from ffn_worker.stream_exchange import StreamExchange

ROWS_TO_SHARE = 64
"""Rows of a call from which more compute threads are worth their start."""


class FfnLoop:
    """Serves all attention instances of the deployment from one thread."""

    def __init__(self, rank: FfnRank) -> None:
        resolved, model, number = rank.resolved, rank.model, rank.pool.place.number
        self.rank = rank
        self.stopping = False
        self.clock = CallClock()
        self.moves = ExpertMoves(resolved, model, rank.control, self.wake)
        self._table = PeerTable(resolved, number, rank.region.device)
        self._late = LatePeers(self._table, rank.metrics)
        self._slots = RankSlots(resolved, rank.region, number)
        reduce = RankReduce(rank.pool.collective)
        self._pipeline = Pipeline(model, reduce)
        self._exchange = HostExchange(self._slots, reduce, self.clock, self.moves)
        self._observer = HostObserver(resolved, rank.metrics)
        self.steps = self._stream_steps(reduce)
        membership = Membership(rank, self._table, self.moves)
        self._source = make_source(
            resolved,
            rank.pool,
            self._slots,
            self._table,
            self._late,
            membership.follow,
            lambda: self.moves.settled,
        )
        trace_wire(resolved, rank.region, rank.metrics)

    def _stream_steps(self, reduce: RankReduce) -> StreamSteps:
        rank, resolved = self.rank, self.rank.resolved
        device, layers = rank.model.device, resolved.model.step_layers
        late_us = int(resolved.deployment.ffn.late_ms * 1e3)
        exchange = StreamExchange(
            resolved,
            rank.pool.place,
            self._slots,
            make_streams(device, resolved.contract.max_depth),
            device,
            in_order=reduce.in_order,
        )
        on_host = AnnouncedHost(
            self._pipeline,
            self._slots,
            AnnouncedExchange(self._slots, reduce, self.clock, self.moves),
            self._observer,
            layers,
            late_us,
        )
        return StreamSteps(
            self._pipeline,
            exchange,
            on_host,
            ReplayReports(resolved, rank.metrics),
            rank.metrics,
            GraphSizes(resolved.contract.graph_buckets),
            late_us,
        )

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures all graphs before this rank is ready, so that no user waits for a capture."""
        self.steps.capture_all()

    def run(self) -> None:
        """Serves until ``stopping`` is set.

        Raises:
            PeerLost, DeadlineExceeded: a rank of this instance is gone or does not keep up; all
                ranks of the instance have to restart.
        """
        try:
            self._pipeline.run(self._host_calls(), self._exchange, self._observer)
        except PeerLost:
            if not self.stopping:  # at shutdown the ranks end in any order
                raise

    def wake(self) -> None:
        """Makes the loop look at ``stopping`` and at the membership; any thread."""
        self.rank.region.wake()
        self.rank.pool.wake()

    def _host_calls(self) -> Iterator[Call]:
        """Yields the expert calls of the host. Runs the announced steps between them."""
        for call in self._source.calls():
            if self.stopping:
                return
            if call is None:  # no message came for a while
                self.steps.forget_all_but(self._table.peers)
                continue
            self.rank.pool.tell(call.order)
            if call.order.kind == Kind.STEP:
                if call.order.bucket:
                    self.moves.settle(call.order.settled)
                self._late.drop_failed(self.steps.run(call))
            else:
                # With one micro-batch, attention waits for this call.
                alone = call.order.depth == 1 and sum(call.rows) >= ROWS_TO_SHARE
                self.rank.cores.use(lent=alone)
                yield call
