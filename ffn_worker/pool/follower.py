"""Heads and followers execute orders once the matching messages arrive.

A *head* is rank 0 of another FFN instance than the leader's. Its instance adds nothing up with
other instances, so a head may leave out of a call an attention instance that it cannot serve. It
also serves alone what no order will name: requests that a peer sent before this process was there
to be told, requests that came too late for their call, and, while there is no leader, everything.
``Peer.unordered`` holds the micro-batches that no order may ever name; an order that names one
removes it.

A *follower* is any other rank. It adds up with the ranks of its instance in every call, so it runs
exactly what rank 0 of its instance runs. What rank 0 received reaches the follower too, unless the
sender dies in between; then no expert computes its rows.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from afd.config.resolve import Resolved
from afd.errors import PeerLost
from afd.graph_sizes import GraphSizes
from afd.schedule import Position
from afd.wire.layout import Kind
from afd.wire.message import Received
from afd_comm import Status
from ffn_worker.pool.arrivals import SLICE_US, Arrivals, OnPause
from ffn_worker.pool.calls import Call, Sender, Settled, step_order
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.order_format import Order, Part, Parts, gets
from ffn_worker.pool.orders import OrderInbox
from ffn_worker.pool.peers import Peer, PeerTable

logger = logging.getLogger("afd.ffn")

_PAUSE_S = 0.005
_UNORDERED_US = 20_000
"""How often a head looks for requests that no order will name, microseconds."""


class Head:
    """Follows the leader; serves alone what no order names."""

    def __init__(
        self,
        resolved: Resolved,
        table: PeerTable,
        arrivals: Arrivals,
        inbox: OrderInbox,
        late: LatePeers,
        on_pause: OnPause,
        settled: Settled,
        instance: int,
    ) -> None:
        """instance: of this process."""
        self._instance = instance
        self._table = table
        self._arrivals = arrivals
        self._inbox = inbox
        self._late = late
        self._on_pause = on_pause
        self._settled = settled
        self._micro_batches = range(resolved.contract.max_depth)
        self._late_s = resolved.deployment.ffn.late_ms / 1e3
        self._sizes = GraphSizes(resolved.contract.graph_buckets)
        self._next_look_s = 0.0  # for unordered requests, on the monotonic clock

    def calls(self) -> Iterator[Call | None]:
        """See :class:`ffn_worker.pool.source.CallSource`."""
        while True:
            self._on_pause()
            order = self._next_order()
            if order is not None:
                step = order.kind == Kind.STEP
                call = self._ordered_step(order) if step else self._ordered_call(order)
                if call is not None:
                    yield call
                # Looks now and then even if orders never stop: a late peer must not wait until
                # all others are idle.
                if time.monotonic() < self._next_look_s:
                    continue
            self._next_look_s = time.monotonic() + _UNORDERED_US / 1e6
            unordered = self._next_unordered()
            if unordered is not None or order is None:
                yield unordered
            if unordered is None and not self._inbox.connected:
                self._arrivals.wait_for_any(self._table.doorbells.joined, _UNORDERED_US)
                time.sleep(_PAUSE_S)

    def _next_order(self) -> Order | None:
        look = any(peer.unordered for peer in self._table.peers) or not self._inbox.connected
        order = self._inbox.wait(_UNORDERED_US if look else SLICE_US)
        if not self._inbox.connected:
            for peer in self._table.peers:
                peer.unordered.update(self._micro_batches)
        return order if isinstance(order, Order) else None

    def _next_unordered(self) -> Call | None:
        """Returns a request or step that no order will name, as a call of its own."""
        if not self._inbox.connected:
            self._arrivals.read_controls()
            announced = np.flatnonzero(self._table.doorbells.announced)
            if announced.size:
                return self._unordered_step(int(announced[0]))
        for peer in self._table.peers:
            if not peer.unordered:
                continue
            header = self._arrivals.earliest(peer, sorted(peer.unordered))
            if header is not None:
                return self._unordered_call(peer, Position(header.layer, header.micro_batch))
        return None

    def _unordered_step(self, rank: int) -> Call:
        """rank: has announced the step."""
        parts = self._table.doorbells.take_announced(rank)
        order = step_order(self._arrivals.first, parts, self._sizes, self._settled())
        return Call(order, self._arrivals.senders_of(parts))

    def _unordered_call(self, peer: Peer, position: Position) -> Call | None:
        header = self._arrivals.take(peer, position.micro_batch)
        problem = self._arrivals.problem(header, position)
        if problem is not None:
            self._late.drop_invalid(peer, problem)
            return None
        return Call.of(position, [Sender(peer, header)])

    def _ordered_call(self, order: Order) -> Call | None:
        """Returns the order without peers whose request is late or was answered already."""
        mb, layer = order.position.micro_batch, order.position.layer
        due = []
        for part in order.parts:
            if not gets(part.receivers, self._instance):
                continue  # it holds none of the experts that this sender knows of
            peer = self._table.find(part.attention)
            if peer is None or peer.generation != part.generation:
                continue  # unknown here, so its requests are unordered once it joins
            peer.unordered.discard(mb)
            if peer.taken[mb] < (part.step, layer):
                due.append((peer, part))
        if not due:
            return None
        peers, deadline = [peer for peer, _ in due], time.monotonic() + self._late_s
        statuses = self._arrivals.await_messages(peers, mb, deadline, self._on_pause)
        senders = []
        for (peer, part), status in zip(due, statuses, strict=True):
            if status == Status.OK and self._arrivals.is_later(peer, mb, (part.step, layer)):
                # The process that ran here before has answered the request that the order names.
                peer.unordered.add(mb)
                continue
            header = self._arrivals.take(peer, mb) if status == Status.OK else None
            if header is None:
                self._late.leave_out(peer, status, order.position)
                peer.unordered.add(mb)
            elif (problem := _mismatch(self._arrivals, header, part, order)) is not None:
                self._late.drop_invalid(peer, problem)
            else:
                senders.append(Sender(peer, header))
        return Call.of(order.position, senders) if senders else None

    def _ordered_step(self, order: Order) -> Call | None:
        """Returns the step without peers that are gone or have not announced it in time, and
        without those that know of no experts here."""
        parts, deadline = Parts.of(order.parts).to(self._instance), time.monotonic() + self._late_s
        here = self._arrivals.await_step(parts, deadline, self._on_pause, even_if_cut_off=False)
        if not here.all():
            for part in Parts.where(parts.table, ~here):
                logger.warning(
                    "%s has not announced step %d to this process; continuing without it",
                    self._arrivals.name_of(part),
                    part.step,
                )
            parts = Parts.where(parts.table, here)
        if not parts:
            return None
        return Call(replace(order, parts=parts), self._arrivals.senders_of(parts))


class Follower:
    """Runs exactly what rank 0 of its instance runs."""

    def __init__(
        self,
        resolved: Resolved,
        arrivals: Arrivals,
        inbox: OrderInbox,
        on_pause: OnPause,
    ) -> None:
        self._arrivals = arrivals
        self._inbox = inbox
        self._on_pause = on_pause
        self._lost_s = resolved.deployment.deadlines.ffn_s

    def calls(self) -> Iterator[Call | None]:
        """See :class:`ffn_worker.pool.source.CallSource`.

        Raises:
            PeerLost: rank 0 is gone, or see :meth:`_sender`.
        """
        while True:
            self._on_pause()
            order = self._inbox.wait(SLICE_US)
            if isinstance(order, Order):
                if order.kind == Kind.STEP:
                    yield self._step(order)
                else:
                    yield Call(order, tuple(self._sender(order, part) for part in order.parts))
            elif self._inbox.connected:
                yield None
            else:
                raise PeerLost(
                    f"{self._inbox.sender_id}, a rank of the same instance, is gone; all its ranks"
                    " restart"
                )

    def _step(self, order: Order) -> Call:
        """Raises PeerLost: a sender that has not left has not announced it in time."""
        parts, deadline = Parts.of(order.parts), time.monotonic() + self._lost_s
        here = self._arrivals.await_step(parts, deadline, self._on_pause, even_if_cut_off=True)
        senders = self._arrivals.senders_of(Parts.where(parts.table, here))
        if here.all():
            return Call(order, senders)
        if time.monotonic() >= deadline:
            raise self._lost(order, next(iter(Parts.where(parts.table, ~here))))
        found = iter(senders)
        return Call(order, tuple(next(found) if came else None for came in here.tolist()))

    def _sender(self, order: Order, part: Part) -> Sender | None:
        """Waits for the request of this part; returns its sender, or None if that is gone.

        Raises:
            PeerLost: neither happens within ``deadlines.ffn_s``, or the sender sent a message that
                does not fit the order.
        """
        deadline = time.monotonic() + self._lost_s
        mb = order.position.micro_batch
        while time.monotonic() < deadline:
            peer = self._arrivals.await_peer(part, deadline, self._on_pause)
            if peer is None:
                return None  # if it comes back, it sends again what was not answered
            soon = time.monotonic() + SLICE_US / 1e6
            if self._arrivals.await_messages([peer], mb, soon, self._on_pause) == [Status.OK]:
                header = self._arrivals.take(peer, mb)
                problem = _mismatch(self._arrivals, header, part, order)
                if problem is None and header.rows != part.rows:
                    problem = f"{header.rows} rows here but {part.rows} to {self._inbox.sender_id}"
                if problem is not None:
                    raise PeerLost(
                        f"{self._arrivals.name_of(part)} sent {problem}; all ranks of the instance"
                        " restart"
                    )
                return Sender(peer, header)
            time.sleep(_PAUSE_S)  # the transport notices a death before the control plane does
        raise self._lost(order, part)

    def _lost(self, order: Order, part: Part) -> PeerLost:
        layer, mb = order.position.layer, order.position.micro_batch
        return PeerLost(
            f"{self._arrivals.name_of(part)} sent rows to {self._inbox.sender_id} but not to this"
            f" rank (layer {layer}, micro-batch {mb}); all ranks of the instance restart and get"
            " them again"
        )


def _mismatch(arrivals: Arrivals, header: Received, part: Part, order: Order) -> str | None:
    """Returns why a message is not the one that an order names, or None."""
    if header.step != part.step:
        return f"step {header.step} where step {part.step} was due"
    return arrivals.problem(header, order.position)
