"""Messages of attention instances: which have arrived, waiting for them, taking them."""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from afd.config.resolve import Resolved
from afd.schedule import Position
from afd.topology import member_id
from afd.wire.layout import Kind
from afd.wire.message import Received, received
from afd_comm import Status
from ffn_worker.pool.calls import Sender
from ffn_worker.pool.doorbells import Mask
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.order_format import Part, Parts, shape_of
from ffn_worker.pool.peers import Arrival, Peer, PeerTable
from ffn_worker.slots import RankSlots

_PAUSE_S = 0.005
_DATA = int(Kind.DATA)  # comparing with an enum takes longer
SLICE_US = 200_000
"""Length of one wait before membership and shutdown are checked, microseconds."""

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
        self._doorbells = table.doorbells
        self._max_depth = resolved.contract.max_depth
        self._attention_tp = resolved.contract.attention_tp
        # Of the last announced step; see senders_of.
        self._peers: list[Peer] = []
        self._ranks = np.zeros(0, np.uint32)
        self._senders: tuple[Sender, ...] = ()
        model = resolved.model
        self.first = Position(model.step_layers[0], 0)
        self.beginnings = {self.first, *(Position(layer, 0) for layer in model.draft_layers)}
        self._first_layers = {position.layer for position in self.beginnings}

    def wait_for_any(self, ranks: Mask, timeout_us: int) -> bool:
        """Returns whether one of these attention ranks has sent a message that was not taken yet.
        Without live ranks it returns at once."""
        return self._doorbells.wait(self._region, ranks, timeout_us)

    def pending(self, ranks: Mask) -> list[Arrival]:
        """Returns the earliest request of each of these attention ranks that has arrived and was
        not taken yet."""
        arrivals = []
        for peer in self._peers_of(self._doorbells.requested(self._region, ranks)):
            header = self.earliest(peer, range(self._max_depth))
            if header is not None:
                start = Position(header.layer, header.micro_batch)
                arrivals.append(Arrival(peer, start, header.depth, header.step))
        return arrivals

    def earliest(self, peer: Peer, micro_batches: Iterable[int]) -> Received | None:
        """Returns the peer's first request, in the order of the step, that has arrived in these
        micro-batches and was not taken yet."""
        region, slots, doorbells = self._region, peer.slots, peer.doorbells.tolist()
        headers = [
            received(region.header(slots[mb]))
            for mb in micro_batches
            if region.ready(slots[mb], doorbells[mb])
        ]
        if len(headers) < 2:
            return headers[0] if headers else None
        return min(headers, key=lambda h: (h.layer, h.micro_batch))

    def read_controls(self) -> None:
        """Takes the messages on the control slots of all peers: leaves and announcements."""
        announced = self._doorbells.read_controls(self._region)
        if announced is None:
            return
        # Most members announce steps of the same shape.
        for rows, depth in map(shape_of, set(self._doorbells.shape_words[announced].tolist())):
            problem = self._slots.problem_of_step(rows, depth, self._max_depth)
            if problem is not None:
                parts = self._doorbells.parts
                bad = announced & (parts["rows"] == rows) & (parts["depth"] == depth)
                for peer in self._peers_of(np.flatnonzero(bad).tolist()):
                    self._late.drop_invalid(peer, problem)

    def _peers_of(self, ranks: Iterable[int]) -> list[Peer]:
        found = [self._table.find(rank) for rank in ranks]
        return [peer for peer in found if peer is not None]

    def await_messages(
        self, peers: Sequence[Peer], micro_batch: int, deadline: float, on_pause: OnPause
    ) -> list[Status]:
        """Waits for every peer's next request in this micro-batch.

        Ends when each request is here or is known not to come, at the latest at ``deadline`` (s,
        monotonic clock). Returns one status per peer.
        """
        slots = [p.slots[micro_batch] for p in peers]
        flags = [p.doorbells.item(micro_batch) for p in peers]
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
            peer = self._known(part)
            if peer is not None or time.monotonic() >= deadline:
                return peer
            time.sleep(_PAUSE_S)

    def await_step(
        self, parts: Parts, deadline: float, on_pause: OnPause, *, even_if_cut_off: bool
    ) -> Mask:
        """Waits until all senders have announced this step here too. They begin it.

        Returns for each part whether its sender has. It has not if it has left or restarted, or
        does not come by ``deadline``.

        Args:
            even_if_cut_off: waits for a sender whose connection broke until it has left.
        """
        while True:
            self.read_controls()
            here = self._doorbells.have_announced(parts)
            if here.all():
                break
            missing = [part for part, came in zip(parts, here.tolist(), strict=True) if not came]
            left_us = int((deadline - time.monotonic()) * 1e6)
            if left_us <= 0 or not any(self._may_come(p, even_if_cut_off) for p in missing):
                break
            ranks = np.zeros_like(self._doorbells.joined)
            ranks[[part.attention for part in missing if self._known(part) is not None]] = True
            if not self.wait_for_any(ranks, min(left_us, SLICE_US)):
                time.sleep(_PAUSE_S)  # without live peers the wait returns at once
            on_pause()
        self._doorbells.begin_steps(parts.table["attention"][here])
        return here

    def senders_of(self, parts: Parts) -> tuple[Sender, ...]:
        """Returns the senders of these parts of an announced step, which are known here. The same
        tuple as long as they are the same."""
        peers, ranks = self._table.peers, parts.table["attention"]
        everyone = len(ranks) == len(self._senders) == len(peers)  # as last time
        if peers is not self._peers or not (everyone or np.array_equal(ranks, self._ranks)):
            self._peers, self._ranks = peers, ranks
            self._senders = tuple(Sender(peer, None) for peer in self._peers_of(ranks.tolist()))
        return self._senders

    def name_of(self, part: Part) -> str:
        return member_id("attention", *divmod(part.attention, self._attention_tp))

    def _known(self, part: Part) -> Peer | None:
        peer = self._table.find(part.attention)
        return peer if peer is not None and peer.generation == part.generation else None

    def _may_come(self, part: Part, even_if_cut_off: bool) -> bool:
        if self._table.has_left(part.attention, part.generation):
            return False
        peer = self._known(part)
        return peer is None or even_if_cut_off or not self._region.gone(peer.slots[-1])

    def is_later(self, peer: Peer, micro_batch: int, named: tuple[int, int]) -> bool:
        """Returns whether the request in the slot is of a later (step, layer) than the named."""
        header = received(self._region.header(peer.slots[micro_batch]))
        return (header.step, header.layer) > named

    def take(self, peer: Peer, micro_batch: int) -> Received:
        """Returns the header of the request in the slot, and counts the request as taken."""
        header = received(self._region.header(peer.slots[micro_batch]))
        peer.doorbells[micro_batch] += 1
        peer.taken[micro_batch] = (header.step, header.layer)
        begins = micro_batch == 0 and header.layer in self._first_layers
        # The peer may have left before this step, and may leave again after it.
        if begins and self._doorbells.has_control(self._region, peer.index):
            self.read_controls()
        return header

    def problem(self, header: Received, position: Position) -> str | None:
        """Returns why a message cannot be the request for this position, or None."""
        problem = self._slots.problem(header)
        if problem is None and (header.layer != position.layer or header.kind != _DATA):
            return f"layer {header.layer} where layer {position.layer} was due"
        return problem
