"""Sessions of an FFN instance with the attention instances it serves."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from afd.control.messages import Member, Members
from afd.resolve import Resolved
from afd.schedule import Position
from afd.topology import session
from afd_comm import CommError, Link, VerbsOptions, make_flag

logger = logging.getLogger("afd.ffn")


@dataclass
class Peer:
    """One attention instance, for one session (see :func:`afd.topology.session`).

    seq: per slot, the sequence number of the last message taken from it; the answer to a message
    carries the message's own number. taken: per micro-batch, step and layer of that message.
    adrift: micro-batches in which what it sends may never be ordered (:mod:`ffn_worker.follower`).
    active: has taken part and not left the epoch since. announced: the step it has announced and
    not begun yet.
    """

    id: str
    index: int
    generation: int
    session: int
    link: Link
    seq: list[int]
    taken: list[tuple[int, int]]
    adrift: set[int]
    active: bool = False
    announced: Announced | None = None


@dataclass(frozen=True)
class Announced:
    """A step that a peer's streams will run: its rows, how many micro-batches they make, and the
    peer's number of it."""

    rows: int
    depth: int
    step: int


@dataclass(frozen=True)
class Arrival:
    """A message that begins a peer's part of a step: where it starts and how deep it runs.

    rows: of the whole step if it was announced; 0 where every message says its own. step: the
    peer's number of it.
    """

    peer: Peer
    start: Position
    depth: int
    rows: int = 0
    step: int = 0


class PeerTable:
    """Follows the membership: links to attention instances that come, forgets those that go."""

    def __init__(self, resolved: Resolved, number: int, device: str) -> None:
        """number: of this rank in the pool. device: of our region, as afd_comm names it; answers
        are written from there."""
        self._resolved = resolved
        self._number = number
        self._device = device
        self._seen = (-1, -1)
        self._peers: dict[str, Peer] = {}
        self._members: dict[int, int] = {}  # attention instances of now: index -> generation
        self._newest: dict[int, int] = {}

    @property
    def peers(self) -> list[Peer]:
        """In order of their index, so that a batch is laid out the same way every time."""
        return sorted(self._peers.values(), key=lambda peer: peer.index)

    def reconcile(self, members: Members, generation: int) -> None:
        """Bring the sessions in line with the membership and with our own generation."""
        if (members.version, generation) == self._seen:
            return
        self._seen = (members.version, generation)
        wanted = {m.id: m for m in members.of("attention")}
        self._members = {m.index: m.generation for m in wanted.values()}
        self._newest |= self._members
        for peer in self.peers:
            member = wanted.get(peer.id)
            if member is None or session(member.generation, generation) != peer.session:
                logger.info("%s (session %d) left", peer.id, peer.session)
                self.drop(peer)
        for member in wanted.values():
            if member.id not in self._peers:
                self._join(member, session(member.generation, generation))

    def drop(self, peer: Peer) -> None:
        """End a session; the peer may come back with the next membership change."""
        peer.link.close()
        if self._peers.get(peer.id) is peer:  # else the instance has another session by now
            del self._peers[peer.id]

    def find(self, attention: int) -> Peer | None:
        """The peer of this index; None while there is no session with it."""
        return next((p for p in self._peers.values() if p.index == attention), None)

    def has_left(self, attention: int, generation: int) -> bool:
        """Whether this attention instance was a member in this life, or a later one, and its life
        is over."""
        known = self._newest.get(attention, 0) >= generation
        return known and self._members.get(attention) != generation

    def slot(self, peer: Peer, micro_batch: int) -> int:
        return self._resolved.slots.to_ffn(peer.index, micro_batch)

    def next_flag(self, peer: Peer, micro_batch: int, ahead: int = 1) -> int:
        """Doorbell value of the next message in the peer's slot of this micro-batch."""
        return make_flag(peer.session, peer.seq[micro_batch] + ahead)

    @property
    def sessions(self) -> set[int]:
        return {peer.session for peer in self._peers.values()}

    def _join(self, member: Member, number: int) -> None:
        transport = self._resolved.deployment.transport
        verbs = transport.verbs_keywords("ffn")
        try:
            link = Link(
                list(member.addresses),
                backend=transport.backend,
                slots=self._resolved.slots.attention_claim(self._number),
                timeout_us=5_000_000,
                device=self._device,
                trace=transport.trace,
                verbs=VerbsOptions(**verbs) if verbs else None,
            )
        except CommError as error:
            # The instance may have died since; the next membership change settles it.
            logger.warning("cannot reach %s: %s", member.id, error)
            self._seen = (-1, -1)
            return
        slots = self._resolved.contract.max_depth + 1
        peer = Peer(
            member.id,
            member.index,
            member.generation,
            number,
            link,
            [0] * slots,
            [(-1, -1)] * self._resolved.contract.max_depth,
            set(range(self._resolved.contract.max_depth)),
        )
        self._peers[member.id] = peer
        logger.info("%s joined (session %d, %s)", peer.id, number, link.backend)
        if link.notes:
            logger.warning("link to %s: %s", peer.id, link.notes)
