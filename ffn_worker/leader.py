"""Decides: who is in a step of the FFN pool, where it starts, and who is left behind in it.

The FFN is the barrier of a step (design: steps, membership, failure). A step starts when every
active attention instance has arrived or ``step_wait`` has passed; an instance with nothing to do
has left the epoch and is not waited for. Inside a step, an instance that is later than ``late`` is
detached: the others go on, and it is served on its own from where it stands. Since no request state
lives here, an attention instance may also begin in mid-step, which is what it does after a process
of the pool was restarted.
"""

import logging
import time
from collections.abc import Iterator

from afd.metrics import RoleMetrics
from afd.resolve import Resolved
from afd.schedule import Position, walk
from afd.wire.layout import Kind
from afd.wire.orders import Order
from afd_comm import Status
from ffn_worker.arrivals import SLICE_US, Arrivals, Hold
from ffn_worker.calls import Call, Sender, part_of
from ffn_worker.peers import Arrival, PeerTable

logger = logging.getLogger("afd.ffn")

_PAUSE_S = 0.005


class Leader:
    """The calls of one step after the other, as they are to be run by every process of the pool."""

    def __init__(
        self,
        resolved: Resolved,
        table: PeerTable,
        arrivals: Arrivals,
        metrics: RoleMetrics,
        hold: Hold,
    ) -> None:
        ffn = resolved.deployment.ffn
        self._table = table
        self._arrivals = arrivals
        self._metrics = metrics
        self._hold = hold
        self._layers = resolved.model.moe_layers
        self._step_wait_s = ffn.step_wait_ms / 1e3
        self._late_s = ffn.late_ms / 1e3

    def calls(self) -> Iterator[Call | None]:
        """For ever; None where nothing came for a while."""
        while True:
            self._hold()
            arrivals = self._next_step()
            if not arrivals:
                yield None
            elif arrivals[0].rows:
                yield self._announced(arrivals)
            else:
                yield from self._step(arrivals)

    def _next_step(self) -> list[Arrival]:
        """Instances that take part in the next step; empty when nothing came for a while."""
        peers = self._table.peers
        if not any(p.announced for p in peers) and not self._arrivals.wait_for_any(peers, SLICE_US):
            time.sleep(_PAUSE_S)  # without live peers the wait returns at once
            return []
        arrived = self._arrivals.of(peers)
        first = self._arrivals.first
        resumed = [a for a in arrived if a.start != first]
        if resumed:
            return resumed[:1]
        deadline = time.monotonic() + self._step_wait_s
        while arrived:
            here = {a.peer.id for a in arrived}
            awaited = [p for p in peers if p.active and p.id not in here]
            left_us = int((deadline - time.monotonic()) * 1e6)
            if not awaited or left_us <= 0 or not self._arrivals.wait_for_any(awaited, left_us):
                break
            arrived = [a for a in self._arrivals.of(peers) if a.start == first]
        # A graph cannot wait for messages of the host, so a step has arrivals of one kind.
        return [a for a in arrived if a.rows] or arrived

    def _announced(self, arrivals: list[Arrival]) -> Call:
        """A step that streams run."""
        for arrival in arrivals:
            arrival.peer.active = True
            arrival.peer.announced = None
        parts = tuple(part_of(a.peer, a.rows, a.depth, a.step) for a in arrivals)
        order = Order(Kind.STEP, self._arrivals.first, parts)
        return Call(order, tuple(Sender(a.peer, None) for a in arrivals))

    def _step(self, arrivals: list[Arrival]) -> Iterator[Call]:
        """All expert calls of one step, in the order in which the attention side posts them."""
        members = {a.peer.id: a for a in arrivals}
        for arrival in arrivals:
            arrival.peer.active = True
        depth = max(a.depth for a in arrivals)
        for position in walk(self._layers, depth, start=arrivals[0].start):
            taking_part = [a for a in members.values() if position.micro_batch < a.depth]
            senders = self._take(taking_part, position)
            here = {sender.peer.id for sender in senders}
            for arrival in taking_part:
                if arrival.peer.id not in here:
                    del members[arrival.peer.id]
            if senders:
                yield Call.of(position, senders)
            elif not members:
                return

    def _take(self, arrivals: list[Arrival], position: Position) -> list[Sender]:
        """Wait for this position's message of everyone; leave out who is late, gone or wrong."""
        if not arrivals:
            return []
        peers, deadline = [a.peer for a in arrivals], time.monotonic() + self._late_s
        mb = position.micro_batch
        statuses = self._arrivals.await_messages(peers, mb, deadline, self._hold)
        senders = []
        for peer, status in zip(peers, statuses, strict=True):
            if status != Status.OK:
                logger.warning(
                    "%s is %s at %s; going on without it", peer.id, status.name, position
                )
                self._metrics.late_peers += 1
                peer.active = False
                continue
            header = self._arrivals.take(peer, mb)
            problem = self._arrivals.problem(header, position)
            if problem is not None:
                logger.error("%s sent %s; dropped until it restarts", peer.id, problem)
                self._table.drop(peer)
                continue
            senders.append(Sender(peer, header))
        return senders
