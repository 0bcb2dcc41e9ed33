"""Sessions of an FFN rank with the attention instances that it serves."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from afd.config.resolve import Resolved
from afd.control.messages import Member, Members
from afd.schedule import Position
from afd.topology import rank_number, session
from afd_comm import CommError, Link, VerbsOptions
from ffn_worker.pool.doorbells import Doorbells
from ffn_worker.pool.membership import MembershipWatch

logger = logging.getLogger("afd.ffn")

_POST_TIMEOUT_US = 5_000_000


@dataclass(eq=False)
class Peer:
    """One attention rank, for one session (see :func:`afd.topology.session`).

    index: among all attention ranks, see :func:`afd.topology.rank_number`. instance: of the rank.
    slots: receive slot per micro-batch, then the control slot.
    doorbells: uint64 [micro-batches], of its next request: a row of :class:`Doorbells`. The answer
        to a request rings the request's doorbell, the one before.
    taken: per micro-batch, step and layer of the last request taken.
    unordered: micro-batches that no order may ever name (:mod:`ffn_worker.pool.follower`).
    """

    id: str
    index: int
    instance: int
    generation: int
    session: int
    link: Link
    slots: tuple[int, ...]
    doorbells: npt.NDArray[np.uint64]
    taken: list[tuple[int, int]]
    unordered: set[int]


class Arrival(NamedTuple):
    """A request that begins a peer's part of a step.

    start: where the peer begins. depth: micro-batches of its step. step: the peer's number of it.
    """

    peer: Peer
    start: Position
    depth: int
    step: int

    def takes_part(self, position: Position) -> bool:
        return position.micro_batch < self.depth and self.start <= position


class PeerTable:
    """Follows the membership: links to new attention ranks, forgets those that are gone.

    doorbells: of the sessions.
    """

    def __init__(self, resolved: Resolved, number: int, device: str) -> None:
        """number: of this rank among all FFN ranks. device: of its region, as afd_comm names it;
        answers are sent from there."""
        self._resolved = resolved
        self._attention_tp = resolved.contract.attention_tp
        self._number = number
        self._device = device
        self._watch = MembershipWatch()
        self.doorbells = Doorbells(resolved.slots)
        self._peers: dict[str, Peer] = {}
        self._by_index: dict[int, Peer] = {}
        self._sorted: list[Peer] | None = None
        self._generations: dict[int, int] = {}  # of current attention ranks, by index
        self._newest: dict[int, int] = {}  # generation that was seen last, by index

    @property
    def peers(self) -> list[Peer]:
        """Sorted by index, so that the layout of a batch is always the same. A new list whenever
        they have changed."""
        if self._sorted is None:
            self._sorted = sorted(self._peers.values(), key=lambda peer: peer.index)
        return self._sorted

    def reconcile(self, members: Members, generation: int) -> None:
        """Updates the sessions to the membership and to our own generation."""
        if not self._watch.has_news(members.version, generation):
            return
        wanted = {m.id: m for m in members.of("attention")}
        self._generations = {self._index(m): m.generation for m in wanted.values()}
        self._newest |= self._generations
        for peer in self.peers:
            member = wanted.get(peer.id)
            if member is None or session(member.generation, generation) != peer.session:
                logger.info("%s left (session %d)", peer.id, peer.session)
                self.drop(peer)
        for member in wanted.values():
            if member.id not in self._peers:
                self._join(member, session(member.generation, generation))

    def drop(self, peer: Peer) -> None:
        """Ends a session. The instance may join again with the next membership change."""
        peer.link.close()
        if self._peers.get(peer.id) is peer:  # otherwise the instance already has a new session
            del self._peers[peer.id], self._by_index[peer.index]
            peer.doorbells = peer.doorbells.copy()  # a call that has begun may still use it
            self.doorbells.end(peer.index)
            self._sorted = None

    def find(self, attention: int) -> Peer | None:
        """Returns the peer with this index; None while there is no session with it."""
        return self._by_index.get(attention)

    def has_left(self, attention: int, generation: int) -> bool:
        """Whether the process of this generation was a member, directly or through a successor,
        and no longer is."""
        known = self._newest.get(attention, 0) >= generation
        return known and self._generations.get(attention) != generation

    def _index(self, member: Member) -> int:
        return rank_number(member.index, member.rank, self._attention_tp)

    def _join(self, member: Member, number: int) -> None:
        """number: of the session."""
        transport = self._resolved.deployment.transport
        verbs = transport.verbs_keywords("ffn")
        try:
            link = Link(
                list(member.addresses),
                backend=transport.backend,
                slots=self._resolved.slots.attention_claim(self._number),
                timeout_us=_POST_TIMEOUT_US,
                device=self._device,
                trace=transport.trace,
                tcp_connections=transport.tcp_connections,
                verbs=VerbsOptions(**verbs) if verbs else None,
            )
        except CommError as error:
            self._watch.failed(member.id, str(error))
            return
        self._watch.reached(member.id)
        max_depth, index = self._resolved.contract.max_depth, self._index(member)
        self.doorbells.begin(index, number, member.generation)
        peer = Peer(
            member.id,
            index,
            member.index,
            member.generation,
            number,
            link,
            tuple(self._resolved.slots.to_ffn(index, mb) for mb in range(max_depth + 1)),
            self.doorbells.requests[index],
            taken=[(-1, -1)] * max_depth,
            unordered=set(range(max_depth)),
        )
        self._peers[member.id] = self._by_index[index] = peer
        self._sorted = None
        logger.info("%s joined (session %d, %s)", peer.id, number, link.backend)
        if link.notes:
            logger.warning("link to %s: %s", peer.id, link.notes)
