"""What attention instances have sent: seen, awaited and taken, slot by slot."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from afd.resolve import Resolved
from afd.schedule import Position
from afd.wire.layout import Kind
from afd.wire.orders import Part
from afd_comm import Header, Region, Status
from ffn_worker.inbox import Inbox
from ffn_worker.peers import Announced, Arrival, Peer, PeerTable

logger = logging.getLogger("afd.ffn")

_PAUSE_S = 0.005
SLICE_US = 200_000
"""How long one wait lasts before membership and shutdown are looked at, microseconds."""

Hold = Callable[[], None]
"""Called in the pauses of a wait: follows the membership, and raises where waiting is no use."""


class Arrivals:
    """Reads the receive slots. Any wait may end early because the region was woken."""

    def __init__(self, resolved: Resolved, region: Region, inbox: Inbox, table: PeerTable) -> None:
        self._region = region
        self._inbox = inbox
        self._table = table
        self._max_depth = resolved.contract.max_depth
        self.first = Position(resolved.model.moe_layers[0], 0)

    def wait_for_any(self, peers: Sequence[Peer], timeout_us: int) -> bool:
        """Whether one of these peers has sent something that was not taken yet."""
        pairs = [(p, mb) for p in peers for mb in range(self._max_depth + 1)]
        slots = [self._table.slot(p, mb) for p, mb in pairs]
        flags = [self._table.next_flag(p, mb) for p, mb in pairs]
        # The control slot may show its second next message already: see read_control.
        slots += [self._table.slot(p, self._max_depth) for p in peers]
        flags += [self._table.next_flag(p, self._max_depth, ahead=2) for p in peers]
        return self._region.wait_any(slots, flags, timeout_us) >= 0

    def of(self, peers: Sequence[Peer]) -> list[Arrival]:
        """What has arrived and was not taken yet: each peer's earliest message. Takes leaves and
        announcements."""
        arrivals = []
        for peer in peers:
            self.read_control(peer)
            if peer.announced is not None:
                step = peer.announced
                arrivals.append(Arrival(peer, self.first, step.depth, step.rows, step.step))
                continue
            first = self.earliest(peer, range(self._max_depth))
            if first is not None:
                start = Position(first.layer, first.micro_batch)
                arrivals.append(Arrival(peer, start, first.depth, 0, first.step))
        return arrivals

    def earliest(self, peer: Peer, micro_batches: Iterable[int]) -> Header | None:
        """The first, in the order of the step, of the peer's messages in these micro-batches that
        have arrived and were not taken yet."""
        heads = [
            self._region.header(self._table.slot(peer, mb))
            for mb in micro_batches
            if self._region.ready(self._table.slot(peer, mb), self._table.next_flag(peer, mb))
        ]
        return min(heads, key=lambda h: (h.layer, h.micro_batch), default=None)

    def read_control(self, peer: Peer) -> None:
        """Take what the peer said on its control slot.

        An announcement may overwrite a leave that nobody has read yet, and nothing else is ever
        overwritten: after an announcement the peer waits for the step, and between two leaves it
        sends a step, with whose first message the first one is read. So of two the second counts.
        """
        mb = self._max_depth
        slot = self._table.slot(peer, mb)
        for ahead in (1, 2):
            flag = self._table.next_flag(peer, mb, ahead)
            if not self._region.ready(slot, flag):
                continue
            header = self._region.header(slot)
            if not self._region.ready(slot, flag):
                continue  # overwritten while it was read
            peer.seq[mb] += ahead
            peer.active = header.kind == Kind.STEP
            if header.kind == Kind.STEP:
                problem = self._inbox.problem_of_step(header, self._max_depth)
                if problem is not None:
                    logger.error("%s announced %s; dropped until it restarts", peer.id, problem)
                    self._table.drop(peer)
                    return
                peer.announced = Announced(header.rows, header.depth, header.step)
            return

    def await_messages(
        self, peers: Sequence[Peer], micro_batch: int, deadline: float, hold: Hold
    ) -> list[Status]:
        """Wait until every peer's next message in this micro-batch is here, until it is known that
        it will not come, or until ``deadline`` (s, monotonic clock). One status per peer."""
        slots = [self._table.slot(p, micro_batch) for p in peers]
        flags = [self._table.next_flag(p, micro_batch) for p in peers]
        while True:
            left_us = int((deadline - time.monotonic()) * 1e6)
            statuses = self._region.wait_all(slots, flags, max(0, min(left_us, SLICE_US)))
            if Status.DEADLINE not in statuses or time.monotonic() >= deadline:
                return statuses
            hold()

    def await_peer(self, part: Part, deadline: float, hold: Hold) -> Peer | None:
        """Who brings this part, once this process has heard of it too; None if it has left, or
        begun anew, or is not heard of."""
        while True:
            hold()
            if self._table.has_left(part.attention, part.generation):
                return None
            peer = self._table.find(part.attention)
            if peer is not None and peer.generation == part.generation:
                return peer
            if time.monotonic() >= deadline:
                return None
            time.sleep(_PAUSE_S)

    def await_announced(self, peer: Peer, step: int, deadline: float, hold: Hold) -> bool:
        """Wait until the peer has announced its step of this number."""
        while True:
            self.read_control(peer)
            if peer.announced is not None and peer.announced.step == step:
                return True
            left_us = int((deadline - time.monotonic()) * 1e6)
            gone = self._region.gone(self._table.slot(peer, self._max_depth))
            if left_us <= 0 or gone or self._table.find(peer.index) is not peer:
                return False
            self.wait_for_any([peer], min(left_us, SLICE_US))
            hold()

    def is_later(self, peer: Peer, micro_batch: int, named: tuple[int, int]) -> bool:
        """Whether the message that is there is of a later (step, layer)."""
        header = self._region.header(self._table.slot(peer, micro_batch))
        return (header.step, header.layer) > named

    def take(self, peer: Peer, micro_batch: int) -> Header:
        """The message that is there; it counts as taken."""
        header = self._region.header(self._table.slot(peer, micro_batch))
        peer.seq[micro_batch] += 1
        peer.taken[micro_batch] = (header.step, header.layer)
        if (header.layer, micro_batch) == (self.first.layer, self.first.micro_batch):
            self.read_control(peer)  # it may have left before this step, and may behind it again
        return header

    def problem(self, header: Header, position: Position) -> str | None:
        """Why a message cannot be the one that is due at this position, or None."""
        problem = self._inbox.problem(header)
        if problem is None and (header.kind, header.layer) != (Kind.DATA, position.layer):
            return f"layer {header.layer} where layer {position.layer} was due"
        return problem
