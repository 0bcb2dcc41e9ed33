"""Those who follow: they run what they are told, once what was sent is here too.

A *head* is rank 0 of another FFN instance than the leader's. Its instance adds nothing up with
others, so it may leave out of a call whom it cannot serve, and serve on its own what no order will
name: what a peer sent before this process was there to be told of it, what came too late for its
call, and, while there is no leader, everything. A peer's micro-batch is *adrift* until an order
names it.

A *rank* adds up with the ranks of its instance in every call, so it runs exactly what its head
does. What its head has it will have too, unless the sender dies in between; then the rows are
masked.
"""

import logging
import time
from collections.abc import Iterator

from afd.errors import PeerLost
from afd.metrics import RoleMetrics
from afd.resolve import Resolved
from afd.schedule import Position
from afd.wire.layout import Kind
from afd.wire.orders import Order, Part
from afd_comm import Header, Status
from ffn_worker.arrivals import SLICE_US, Arrivals, Hold
from ffn_worker.calls import Call, Sender, part_of
from ffn_worker.orders import OrderBox
from ffn_worker.peers import Announced, Peer, PeerTable

logger = logging.getLogger("afd.ffn")

_PAUSE_S = 0.005
_ADRIFT_US = 20_000
"""How often what no order will name is looked for, microseconds."""


class Head:
    """Follows the leader; on its own where that cannot help."""

    def __init__(
        self,
        resolved: Resolved,
        table: PeerTable,
        arrivals: Arrivals,
        box: OrderBox,
        metrics: RoleMetrics,
        hold: Hold,
    ) -> None:
        self._table = table
        self._arrivals = arrivals
        self._box = box
        self._metrics = metrics
        self._hold = hold
        self._micro_batches = range(resolved.contract.max_depth)
        self._late_s = resolved.deployment.ffn.late_ms / 1e3
        self._next_look_s = 0.0  # for what is adrift, on the monotonic clock

    def calls(self) -> Iterator[Call | None]:
        """For ever; None where nothing came for a while."""
        while True:
            self._hold()
            order = self._next_order()
            if order is not None:
                call = self._announced(order) if order.kind == Kind.STEP else self._call(order)
                if call is not None:
                    yield call
                if time.monotonic() < self._next_look_s:
                    continue  # or who was late would wait until nobody else has anything to do
            self._next_look_s = time.monotonic() + _ADRIFT_US / 1e6
            alone = self._next_alone()
            if alone is not None or order is None:
                yield alone
            if alone is None and not self._box.led:
                self._arrivals.wait_for_any(self._table.peers, _ADRIFT_US)
                time.sleep(_PAUSE_S)

    def _next_order(self) -> Order | None:
        adrift = any(peer.adrift for peer in self._table.peers)
        order = self._box.wait(_ADRIFT_US if adrift or not self._box.led else SLICE_US)
        if not self._box.led:
            for peer in self._table.peers:
                peer.adrift.update(self._micro_batches)
        return order if isinstance(order, Order) else None

    def _next_alone(self) -> Call | None:
        """What a peer has sent that is adrift, as a call of its own."""
        for peer in self._table.peers:
            if not self._box.led:
                self._arrivals.read_control(peer)
                if peer.announced is not None:
                    return self._announced_alone(peer, peer.announced)
            header = self._arrivals.earliest(peer, sorted(peer.adrift))
            if header is not None:
                return self._alone(peer, Position(header.layer, header.micro_batch))
        return None

    def _announced_alone(self, peer: Peer, step: Announced) -> Call:
        peer.announced = None
        part = part_of(peer, step.rows, step.depth, step.step)
        order = Order(Kind.STEP, self._arrivals.first, (part,))
        return Call(order, (Sender(peer, None),))

    def _alone(self, peer: Peer, position: Position) -> Call | None:
        header = self._arrivals.take(peer, position.micro_batch)
        problem = self._arrivals.problem(header, position)
        if problem is not None:
            logger.error("%s sent %s; dropped until it restarts", peer.id, problem)
            self._table.drop(peer)
            return None
        return Call.of(position, [Sender(peer, header)])

    def _call(self, order: Order) -> Call | None:
        """The order without those who are not here in time, or were answered already."""
        mb, layer = order.position.micro_batch, order.position.layer
        due = []
        for part in order.parts:
            peer = self._table.find(part.attention)
            if peer is None or peer.generation != part.generation:
                continue  # not known here yet, so adrift
            peer.adrift.discard(mb)
            if peer.taken[mb] < (part.step, layer):
                due.append((peer, part))
        if not due:
            return None
        peers, deadline = [peer for peer, _ in due], time.monotonic() + self._late_s
        statuses = self._arrivals.await_messages(peers, mb, deadline, self._hold)
        senders = []
        for (peer, part), status in zip(due, statuses, strict=True):
            if status == Status.OK and self._arrivals.is_later(peer, mb, (part.step, layer)):
                peer.adrift.add(mb)  # the process before this one has answered what is named
                continue
            header = self._arrivals.take(peer, mb) if status == Status.OK else None
            if header is None:
                logger.warning("%s is %s at %s", peer.id, status.name, order.position)
                self._metrics.late_peers += 1
                peer.adrift.add(mb)
            elif (problem := _mismatch(self._arrivals, header, part, order)) is not None:
                logger.error("%s sent %s; dropped until it restarts", peer.id, problem)
                self._table.drop(peer)
            else:
                senders.append(Sender(peer, header))
        return Call.of(order.position, senders) if senders else None

    def _announced(self, order: Order) -> Call | None:
        parts, senders = [], []
        deadline = time.monotonic() + self._late_s
        for part in order.parts:
            peer = self._arrivals.await_peer(part, deadline, self._hold)
            if peer is None:
                continue
            if self._arrivals.await_announced(peer, part.step, deadline, self._hold):
                peer.announced = None
                parts.append(part)
                senders.append(Sender(peer, None))
            else:
                logger.warning("%s has not announced a step that it is in", peer.id)
        if not parts:
            return None
        return Call(Order(order.kind, order.position, tuple(parts)), tuple(senders))


class Rank:
    """Follows the head of its instance in everything."""

    def __init__(
        self,
        resolved: Resolved,
        arrivals: Arrivals,
        box: OrderBox,
        hold: Hold,
    ) -> None:
        self._arrivals = arrivals
        self._box = box
        self._hold = hold
        self._lost_s = resolved.deployment.deadlines.ffn_s

    def calls(self) -> Iterator[Call | None]:
        """For ever; None where nothing came for a while.

        Raises:
            PeerLost: the head is gone, or see :meth:`_sender`.
        """
        while True:
            self._hold()
            order = self._box.wait(SLICE_US)
            if isinstance(order, Order):
                yield Call(order, tuple(self._sender(order, part) for part in order.parts))
            elif self._box.led:
                yield None
            else:
                raise PeerLost(
                    f"{self._box.superior_id}, a rank of the same instance, is gone; all its ranks"
                    " start again"
                )

    def _sender(self, order: Order, part: Part) -> Sender | None:
        """Who sent this part, once it is here; None if the sender is gone.

        Raises:
            PeerLost: neither in ``deadlines.ffn_s``, or the sender sent something else.
        """
        deadline = time.monotonic() + self._lost_s
        mb = order.position.micro_batch
        while time.monotonic() < deadline:
            peer = self._arrivals.await_peer(part, deadline, self._hold)
            if peer is None:
                return None  # what it has no answer to it sends again if it comes back
            soon = time.monotonic() + SLICE_US / 1e6
            if order.kind == Kind.STEP:
                if self._arrivals.await_announced(peer, part.step, soon, self._hold):
                    peer.announced = None
                    return Sender(peer, None)
            elif self._arrivals.await_messages([peer], mb, soon, self._hold) == [Status.OK]:
                header = self._arrivals.take(peer, mb)
                problem = _mismatch(self._arrivals, header, part, order)
                if problem is None and header.rows != part.rows:
                    problem = f"{header.rows} rows, but {part.rows} to {self._box.superior_id}"
                if problem is not None:
                    raise PeerLost(f"attention-{part.attention} sent {problem}; start again")
                return Sender(peer, header)
            time.sleep(_PAUSE_S)  # the transport sees a death before the control plane
        raise PeerLost(
            f"attention-{part.attention} sent nothing for {order.position}, but to "
            f"{self._box.superior_id}; its rows are asked for again after a restart"
        )


def _mismatch(arrivals: Arrivals, header: Header, part: Part, order: Order) -> str | None:
    """Why a message is not the one that an order names, or None."""
    if header.step != part.step:
        return f"step {header.step} where step {part.step} was due"
    return arrivals.problem(header, order.position)
