"""Sessions of an attention instance with the FFN ranks: who is there, and a link to each."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from afd.control.client import ControlClient
from afd.control.messages import Member, Members, member_id
from afd.errors import DeadlineExceeded
from afd.resolve import Resolved
from afd.topology import session
from afd_comm import CommError, Link, VerbsOptions

logger = logging.getLogger("afd.attention")

POST_TIMEOUT_US = 5_000_000
"""How long connecting, or one call to post, may take, microseconds."""
_RETRY_S = 0.1
_PATIENCE = 1.5
"""How long a rank that the control plane has as a member may be out of reach, in timeouts of the
control plane: until then the rank may have died, and the control plane be about to say so."""


@dataclass(frozen=True)
class Ffn:
    """Session with one FFN rank."""

    id: str
    session: int
    link: Link


class FfnSessions:
    """``j`` is the number of an FFN rank (:func:`afd.topology.ffn_number`).

    Both sides of a session have a generation that the control plane may change at any time, so ours
    counts from where :meth:`rejoined` has told it: until then all sessions are of the one before,
    and what they send is void.

    Not thread-safe: used by the model's forward only.
    """

    def __init__(self, resolved: Resolved, index: int, device: str, control: ControlClient) -> None:
        """index: of this attention instance. device: of what is sent, as afd_comm names it."""
        self._transport = resolved.deployment.transport
        self._claim = resolved.slots.ffn_claim(index)
        self._count, self._tp = resolved.slots.ffn_ranks, resolved.contract.ffn_tp
        self._device = device
        self._control = control
        self._patience_s = _PATIENCE * resolved.deployment.control.timeout_s
        self._cut_off: dict[int, float] = {}  # ranks out of reach -> since when
        self._generation = 0
        self._ffns: list[Ffn] = []

    @property
    def all(self) -> tuple[Ffn, ...]:
        """By number; replaced where one is renewed."""
        return tuple(self._ffns)

    def connect(self, deadline_s: float) -> None:
        """Begin one with every FFN rank, once all of them are ready.

        Raises:
            DeadlineExceeded: names the ranks that did not come.
        """
        deadline = time.monotonic() + deadline_s
        names = ", ".join(self.name(j) for j in range(self._count))

        def all_ready(members: Members) -> bool:
            return len(members.of("ffn", state="ready")) == self._count

        self._control.wait_for(all_ready, deadline_s=deadline_s, what=names)
        self._generation = self._control.generation
        self._ffns = [self._begin(j, None, deadline) for j in range(self._count)]

    def rejoined(self) -> bool:
        """Whether this instance has got a new generation since the last call, mostly because the
        control plane had given it up: every session has ended then."""
        before, self._generation = self._generation, self._control.generation
        return before != self._generation

    def is_lost(self, j: int) -> bool:
        """Whether the session has ended: the FFN rank is gone, or has registered anew."""
        member = self._control.members.find("ffn", *self._place(j))
        return member is None or self._number(member) != self._ffns[j].session

    def cut_off(self, ranks: Iterable[int]) -> None:
        """To be told in every look at the transport which FFN ranks it does not reach, if any.

        A connection may break between two that live, and an FFN rank may drop an instance that it
        cannot follow. If that lasts, this instance registers anew: then everybody links anew.
        """
        now = time.monotonic()
        self._cut_off = {j: self._cut_off.get(j, now) for j in ranks if not self.is_lost(j)}
        lasting = [j for j, since in self._cut_off.items() if now - since > self._patience_s]
        if lasting:
            names = ", ".join(self.name(j) for j in lasting)
            logger.warning("%s cannot be reached, but lives; registering anew", names)
            self._cut_off.clear()
            self._control.renew()

    def renew(self, j: int, deadline: float) -> Ffn:
        """End this session, and wait until another one can begin.

        Raises:
            DeadlineExceeded: none by ``deadline`` (s, monotonic clock).
        """
        old = self._ffns[j]
        old.link.close()
        self._ffns[j] = self._begin(j, old.session, deadline)
        return self._ffns[j]

    def close(self) -> None:
        for ffn in self._ffns:
            ffn.link.close()

    def name(self, j: int) -> str:
        return member_id("ffn", *self._place(j))

    def instance_of(self, j: int) -> range:
        """Numbers of all ranks of the FFN instance that this rank is of."""
        first = j - j % self._tp
        return range(first, first + self._tp)

    def _place(self, j: int) -> tuple[int, int]:
        """(instance, rank)."""
        return divmod(j, self._tp)

    def _number(self, member: Member) -> int:
        return session(self._generation, member.generation)

    def _begin(self, j: int, ended: int | None, deadline: float) -> Ffn:
        """A session of another number than ``ended``."""
        place, name, said = self._place(j), self.name(j), ""

        def is_there(members: Members) -> bool:
            member = members.find("ffn", *place)
            if member is None or member.state != "ready":
                return False
            return self._number(member) != ended

        while True:
            left_s = max(0.0, deadline - time.monotonic())
            members = self._control.wait_for(is_there, deadline_s=left_s, what=name)
            member = members.find("ffn", *place)
            assert member is not None
            try:
                return self._link(member)
            except CommError as error:
                # It may have ended since: then the control plane will say so.
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"{name} cannot be reached: {error}") from error
                if str(error) != said:
                    said = str(error)
                    logger.warning("cannot reach %s yet: %s", name, said)
            time.sleep(_RETRY_S)

    def _link(self, member: Member) -> Ffn:
        verbs = self._transport.verbs_keywords("attention")
        link = Link(
            list(member.addresses),
            backend=self._transport.backend,
            slots=self._claim,
            timeout_us=POST_TIMEOUT_US,
            device=self._device,
            trace=self._transport.trace,
            verbs=VerbsOptions(**verbs) if verbs else None,
        )
        if link.notes:
            logger.warning("link to %s: %s", member.id, link.notes)
        return Ffn(member.id, self._number(member), link)
