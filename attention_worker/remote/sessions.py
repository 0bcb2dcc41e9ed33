"""The sessions of an attention instance with the FFN ranks: who is there, and a link to each."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from afd.config.resolve import Resolved
from afd.control.client import ControlClient
from afd.control.messages import Member, Members
from afd.errors import DeadlineExceeded
from afd.topology import member_id, rank_number, session
from afd_comm import CommError, Link, Region, VerbsOptions

logger = logging.getLogger("afd.attention")

POST_TIMEOUT_US = 5_000_000
"""Longest time for connecting, and for one call that posts, microseconds."""
_RETRY_S = 0.1
_PATIENCE = 1.5
"""How long a registered FFN rank may be out of reach, as a multiple of ``control.timeout_s``. Until
then it may have died without the control plane having noticed."""


@dataclass(frozen=True)
class FfnSession:
    """The session with one FFN rank. id: member id of the rank. rank: its number among all FFN
    ranks (:func:`afd.topology.rank_number`). session: number of the session."""

    id: str
    rank: int
    session: int
    link: Link


def run_alone(region: Region, peers: Sequence[FfnSession]) -> bool:
    """Whether messages leave and arrive without a call of the device's driver by this process.

    If not, the host must not give the device further work while a step runs: a call that waits for
    the device, such as the first use of a kernel, holds up the driver, and the message that the
    device waits for needs the driver too.

    Args:
        region: the receive slots of the answers.
    """
    return all(
        peer.link.backend == "ipc"
        or (peer.link.backend == "verbs" and peer.link.sends_alone and region.nics_write_alone)
        for peer in peers
    )


class FfnSessions:
    """The current session with each FFN rank in use.

    ``j`` is the number of an FFN rank (:func:`afd.topology.rank_number`).

    FFN instances that hold no experts are not in use. Their sessions stay while they live, because
    they may be used again.

    A session number is made of the generations of both sides. The control plane may give this
    instance a new generation at any time. It takes effect here when :meth:`rejoined` reports it;
    until then, all sessions and messages belong to the old generation, and the FFN ranks ignore
    them.

    Not thread-safe: used by the model's forward only.

    Attributes:
        instances, ranks: the FFN instances in use, and the numbers of their ranks, ascending.
    """

    def __init__(
        self, resolved: Resolved, number: int, device: str, control: ControlClient
    ) -> None:
        """number: of this attention rank. device: of the memory that is sent, as afd_comm names
        it."""
        self._transport = resolved.deployment.transport
        self._claim = resolved.slots.ffn_claim(number)
        self._tp = resolved.contract.ffn_tp
        self._device = device
        self._control = control
        self._patience_s = _PATIENCE * resolved.deployment.control.timeout_s
        self._unreachable: dict[int, float] = {}  # rank -> since when
        self._generation = 0
        self._sessions: dict[int, FfnSession] = {}
        self._idle: dict[int, FfnSession] = {}  # of ranks that are not in use
        self._members: Members | None = None
        self._registered: dict[int, Member] = {}  # of these members, by number of the rank
        self.instances: tuple[int, ...] = ()
        self.ranks: list[int] = []

    @property
    def all(self) -> tuple[FfnSession, ...]:
        """The sessions by number of the rank. A renewed session is a new object."""
        return tuple(self._sessions[j] for j in self.ranks)

    @property
    def kept(self) -> tuple[FfnSession, ...]:
        """The sessions whose links are open, in no order."""
        return (*self._sessions.values(), *self._idle.values())

    def of(self, j: int) -> FfnSession:
        """The session with rank j, which is in use."""
        return self._sessions[j]

    def connect(self, instances: Callable[[], tuple[int, ...]], deadline_s: float) -> None:
        """Waits until every rank of these FFN instances is ready, and begins a session with each.

        Args:
            instances: those that hold experts now.

        Raises:
            DeadlineExceeded: names the ranks that are not ready after ``deadline_s`` seconds.
        """
        deadline = time.monotonic() + deadline_s
        names = ", ".join(self.name(j) for j in self._ranks_of(instances()))

        def all_ready(members: Members) -> bool:
            found = [members.find("ffn", *self._place(j)) for j in self._ranks_of(instances())]
            return all(member is not None and member.state == "ready" for member in found)

        self._control.wait_for(all_ready, deadline_s=deadline_s, what=names)
        self._generation = self._control.generation
        self.use(instances(), deadline)

    def use(self, instances: tuple[int, ...], deadline: float) -> list[int]:
        """Uses these FFN instances from now on. Returns the ranks with which a session has begun.

        Args:
            deadline: seconds of the monotonic clock.

        Raises:
            DeadlineExceeded: a rank is not ready, or cannot be reached, at ``deadline``.
        """
        self.close_idle()
        known = self._idle | self._sessions
        self.instances, self.ranks = instances, self._ranks_of(instances)
        new = [j for j in self.ranks if j not in known]
        self._sessions = {j: known.pop(j) for j in self.ranks if j in known}
        self._idle = known
        for j in new:
            self._sessions[j] = self._begin(j, None, deadline)
        return new

    def close_idle(self) -> None:
        """Closes the sessions that have ended and are not in use."""
        for j in [j for j, idle in self._idle.items() if self._has_ended(j, idle)]:
            self._idle.pop(j).link.close()

    def rejoined(self) -> bool:
        """Returns whether this instance has a new generation since the last call.

        The usual cause: the control plane had given it up. All its sessions have ended then.
        """
        before, self._generation = self._generation, self._control.generation
        return before != self._generation

    def is_lost(self, j: int) -> bool:
        """Returns whether the session with rank j has ended: the rank is gone, or has registered
        again."""
        return self._has_ended(j, self._sessions[j])

    def note_unreachable(self, ranks: Iterable[int]) -> None:
        """Notes which FFN ranks the transport does not reach right now, if any.

        Call it after every wait. A connection may break between two live processes, and an FFN rank
        may drop an instance that it cannot follow. If such a state lasts, this instance registers
        again, and every role links to it again.
        """
        now = time.monotonic()
        self._unreachable = {j: self._unreachable.get(j, now) for j in ranks if not self.is_lost(j)}
        lasting = [j for j, since in self._unreachable.items() if now - since > self._patience_s]
        if lasting:
            names = ", ".join(self.name(j) for j in lasting)
            logger.warning("cannot reach %s, although registered; registering again", names)
            self._unreachable.clear()
            self._control.renew()

    def renew(self, j: int, deadline: float) -> FfnSession:
        """Ends the session with rank j, and waits until a new one can begin.

        Args:
            deadline: seconds of the monotonic clock.

        Raises:
            DeadlineExceeded: no new session by ``deadline``.
        """
        old = self._sessions[j]
        old.link.close()
        self._sessions[j] = self._begin(j, old.session, deadline)
        return self._sessions[j]

    def close(self) -> None:
        for ffn in self.kept:
            ffn.link.close()

    def name(self, j: int) -> str:
        """Returns the member id of rank j."""
        return member_id("ffn", *self._place(j))

    def instance_of(self, j: int) -> range:
        """Returns the numbers of all ranks of the FFN instance that rank j belongs to."""
        first = j - j % self._tp
        return range(first, first + self._tp)

    def _has_ended(self, j: int, known: FfnSession) -> bool:
        members = self._control.members
        if members is not self._members:  # else every step would look for every rank
            self._members = members
            self._registered = {
                rank_number(m.index, m.rank, self._tp): m for m in members.of("ffn")
            }
        member = self._registered.get(j)
        return member is None or self._number(member) != known.session

    def _ranks_of(self, instances: tuple[int, ...]) -> list[int]:
        return [j * self._tp + rank for j in instances for rank in range(self._tp)]

    def _place(self, j: int) -> tuple[int, int]:
        """(instance, rank)."""
        return divmod(j, self._tp)

    def _number(self, member: Member) -> int:
        return session(self._generation, member.generation)

    def _begin(self, j: int, ended: int | None, deadline: float) -> FfnSession:
        """Begins a session with rank j whose number differs from ``ended``."""
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
                # The rank may have ended since; the control plane will then say so.
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{name} cannot be reached: {error}; look at its log"
                    ) from error
                if str(error) != said:
                    said = str(error)
                    logger.warning("cannot reach %s yet: %s; retrying", name, said)
            time.sleep(_RETRY_S)

    def _link(self, member: Member) -> FfnSession:
        verbs = self._transport.verbs_keywords("attention")
        link = Link(
            list(member.addresses),
            backend=self._transport.backend,
            slots=self._claim,
            timeout_us=POST_TIMEOUT_US,
            device=self._device,
            trace=self._transport.trace,
            tcp_connections=self._transport.tcp_connections,
            verbs=VerbsOptions(**verbs) if verbs else None,
        )
        if link.notes:
            logger.warning("link to %s: %s", member.id, link.notes)
        rank = rank_number(member.index, member.rank, self._tp)
        return FfnSession(member.id, rank, self._number(member), link)
