"""Messages of attention instances: which have arrived, waiting for them, taking them."""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from afd.config.resolve import Resolved
from afd.schedule import Position
from afd.wire.layout import Kind
from afd.wire.message import Received, received
from afd_comm import Status
from ffn_worker.pool.doorbells import Doorbells
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.order_format import PARTS, Part, Parts
from ffn_worker.pool.peers import Arrival, Peer, PeerTable
from ffn_worker.slots import RankSlots

_PAUSE_S = 0.005
_FIELDS = ("seen", "kind", "rows", "depth", "step", "moves")
SLICE_US = 200_000
"""Length of one wait before membership and shutdown are checked, microseconds."""

_new = tuple.__new__  # skips the constructor of a NamedTuple, which takes as long as the rest

OnPause = Callable[[], None]
"""Called in the pauses of a wait: follows the membership, raises PeerLost if waiting is useless."""


class Arrivals:
    """Reads the receive slots. Any wait may end early because the region was woken.

    first: where a step begins. beginnings: that, and every draft layer, which is a step of its own.
    """

    def __init__(
        self, resolved: Resolved, slots: RankSlots, table: PeerTable, late: LatePeers
    ) -> None:
        self._region = slots.region
        self._slots = slots
        self._late = late
        self._table = table
        self._max_depth = resolved.contract.max_depth
        self._known: Doorbells | None = None  # of several peers
        self._single: dict[str, Doorbells] = {}
        model = resolved.model
        self.first = Position(model.step_layers[0], 0)
        self.beginnings = {self.first, *(Position(layer, 0) for layer in model.draft_layers)}
        # By attention rank: its part of an order for the step that it has announced last.
        self._parts = np.zeros(resolved.slots.attention_ranks, PARTS)

    def wait_for_any(self, peers: Sequence[Peer], timeout_us: int) -> bool:
        """Returns whether one of these peers has sent a message that was not taken yet."""
        slots, flags = self._doorbells(peers).awaited()
        return self._region.wait_any_of(slots, flags, timeout_us) >= 0

    def pending(self, peers: Sequence[Peer]) -> list[Arrival]:
        """Returns each peer's earliest message that has arrived and was not taken yet.

        Announcements are those that :meth:`read_controls` has taken.
        """
        arrivals = []
        for peer in peers:
            if peer.announced is not None:
                arrivals.append(peer.announced)
                continue
            header = self.earliest(peer, range(self._max_depth))
            if header is not None:
                start = Position(header.layer, header.micro_batch)
                arrivals.append(Arrival(peer, start, header.depth, 0, header.step))
        return arrivals

    def earliest(self, peer: Peer, micro_batches: Iterable[int]) -> Received | None:
        """Returns the peer's first request, in the order of the step, that has arrived in these
        micro-batches and was not taken yet."""
        region, slots = self._region, peer.slots
        headers = [
            received(region.header(slots[mb]))
            for mb in micro_batches
            if region.ready(slots[mb], peer.first_flag + peer.seq[mb])
        ]
        if len(headers) < 2:
            return headers[0] if headers else None
        return min(headers, key=lambda h: (h.layer, h.micro_batch))

    def read_controls(self, peers: Sequence[Peer]) -> None:
        """Takes the messages on the control slots of these peers: leaves and announcements."""
        self._read_controls(self._doorbells(peers))

    def parts_of(self, arrivals: Sequence[Arrival]) -> Parts:
        """Returns the parts of an order for these announced steps."""
        return Parts(self._parts[[arrival.peer.index for arrival in arrivals]])

    def read_control(self, peer: Peer) -> None:
        """Takes the message on the peer's control slot, if there is one."""
        known = self._single.get(peer.id)
        if known is None or known.peers[0] is not peer:
            known = self._single[peer.id] = self._make_doorbells([peer])
        self._read_controls(known)

    def _read_controls(self, doorbells: Doorbells) -> None:
        """Takes the messages on the control slots of these peers.

        An announcement may overwrite a leave that was not read yet, so the slot may show the second
        message after the last one taken; then only the second counts. Nothing else is overwritten:
        after an announcement the peer waits for the step, and between two leaves it sends a step,
        whose first request makes us read the first leave.
        """
        senders, headers, parts = doorbells.read_controls(self._region)
        if not senders:
            return
        announces, first = int(Kind.STEP), self.first  # comparing with an IntEnum takes longer
        steps = parts[headers["kind"] == announces]
        self._parts[steps["attention"]] = steps
        columns = [headers[name].tolist() for name in _FIELDS]
        # Most members announce steps of the same shape.
        problems = {
            shape: self._slots.problem_of_step(*shape, self._max_depth)
            for shape in set(zip(columns[2], columns[3], strict=True))
        }
        for peer, seen, kind, rows, depth, step, moves in zip(senders, *columns, strict=True):
            peer.seq[-1] += seen
            peer.active = kind == announces
            if peer.active:
                problem = problems[rows, depth]
                if problem is None:
                    peer.announced = _new(Arrival, (peer, first, depth, rows, step, moves))
                else:
                    self._late.drop_invalid(peer, problem)

    def _doorbells(self, peers: Sequence[Peer]) -> Doorbells:
        """The same object for the same list of peers."""
        if self._known is None or self._known.peers is not peers:
            self._known = self._make_doorbells(peers)
        return self._known

    def _make_doorbells(self, peers: Sequence[Peer]) -> Doorbells:
        return Doorbells(peers, [peer.slots[0] for peer in peers], self._max_depth)

    def await_messages(
        self, peers: Sequence[Peer], micro_batch: int, deadline: float, on_pause: OnPause
    ) -> list[Status]:
        """Waits for every peer's next request in this micro-batch.

        Ends when each request is here or is known not to come, at the latest at ``deadline`` (s,
        monotonic clock). Returns one status per peer.
        """
        slots = [p.slots[micro_batch] for p in peers]
        flags = [p.first_flag + p.seq[micro_batch] for p in peers]
        while True:
            left_us = int((deadline - time.monotonic()) * 1e6)
            statuses = self._region.wait_all(slots, flags, max(0, min(left_us, SLICE_US)))
            if Status.DEADLINE not in statuses or time.monotonic() >= deadline:
                return statuses
            on_pause()

    def await_peer(self, part: Part, deadline: float, on_pause: OnPause) -> Peer | None:
        """Waits until this process knows the sender of a part too, and returns the peer.

        Returns None if the sender has left or restarted, or is still unknown at ``deadline``.
        """
        while True:
            on_pause()
            if self._table.has_left(part.attention, part.generation):
                return None
            peer = self._table.find(part.attention)
            if peer is not None and peer.generation == part.generation:
                return peer
            if time.monotonic() >= deadline:
                return None
            time.sleep(_PAUSE_S)

    def await_announced(self, peer: Peer, step: int, deadline: float, on_pause: OnPause) -> bool:
        """Waits until the peer has announced its step of this number; returns whether it has."""
        while True:
            self.read_control(peer)
            if peer.announced is not None and peer.announced.step == step:
                return True
            left_us = int((deadline - time.monotonic()) * 1e6)
            gone = self._region.gone(peer.slots[-1])
            if left_us <= 0 or gone or self._table.find(peer.index) is not peer:
                return False
            self.wait_for_any([peer], min(left_us, SLICE_US))
            on_pause()

    def is_later(self, peer: Peer, micro_batch: int, named: tuple[int, int]) -> bool:
        """Returns whether the request in the slot is of a later (step, layer) than the named."""
        header = received(self._region.header(peer.slots[micro_batch]))
        return (header.step, header.layer) > named

    def take(self, peer: Peer, micro_batch: int) -> Received:
        """Returns the header of the request in the slot, and counts the request as taken."""
        header = received(self._region.header(peer.slots[micro_batch]))
        peer.seq[micro_batch] += 1
        peer.taken[micro_batch] = (header.step, header.layer)
        if Position(header.layer, micro_batch) in self.beginnings:
            # The peer may have left before this step, and may leave again after it.
            self.read_control(peer)
        return header

    def problem(self, header: Received, position: Position) -> str | None:
        """Returns why a message cannot be the request for this position, or None."""
        problem = self._slots.problem(header)
        if problem is None and (header.kind, header.layer) != (Kind.DATA, position.layer):
            return f"layer {header.layer} where layer {position.layer} was due"
        return problem
