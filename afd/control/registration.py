"""The member's side of the control protocol, without sockets and with an injected clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from afd.control import messages as m
from afd.topology import member_id

_log = logging.getLogger(__name__)


class Registration:
    """What a member knows, and which message it sends next. The client's lock guards it.

    generation: 0 before the first Welcome. refused: reason of a final refusal. waiting: reason why
    the server asked to try again. stopping: the operator ended the deployment.
    """

    def __init__(
        self,
        hello: m.Hello,
        timing: m.Timing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hello = hello
        self._clock = clock
        self._heard = self._next = clock()
        self._incarnation = 0
        self._said_hello = False
        self._renewing = False
        self.timing = timing
        self.state: m.State = hello.state
        self.moves = 0
        self.move_fault = ""
        self.work: Callable[[], m.Work] = m.Work
        self.members = m.Members()
        self.generation = 0
        self.joined = False
        self.silent = False
        self.left = False
        self.stopping = False
        self.waiting: str | None = None
        self.refused: str | None = None

    @property
    def name(self) -> str:
        return member_id(self._hello.role, self._hello.index, self._hello.rank)

    @property
    def active(self) -> bool:
        """True while there are messages to send."""
        return not self.left and self.refused is None

    def wait_s(self) -> float:
        """Seconds until :meth:`due` has the next message."""
        return max(0.0, self._next - self._clock()) if self.active else self.timing.interval_s

    def speak_now(self) -> None:
        """Makes the next message due now: after a connection was made or the state changed."""
        self._next = self._clock()

    def due(self) -> m.ToServer | None:
        """Returns the message to send now, if one is due."""
        if self.left:
            said_hello, self._said_hello, self.joined = self._said_hello, False, False
            return m.Bye() if said_hello else None
        if not self.active or self._clock() < self._next:
            return None
        if self._renewing:
            self._renewing, self.joined = False, False  # a Hello follows at once
            return m.Bye()
        self._next = self._clock() + self.timing.interval_s
        if self.joined:
            return m.Heartbeat(
                self.state, self.members.version, self.moves, self.move_fault, self.work()
            )
        self._said_hello = True
        if self.generation == 0:
            return msgspec.structs.replace(self._hello, state=self.state)
        return msgspec.structs.replace(
            self._hello,
            state=self.state,
            generation=self.generation,
            incarnation=self._incarnation,
            known=self.members,
        )

    def handle(self, message: m.FromServer) -> bool:
        """Applies a message of the server; True if the snapshot or the membership changed."""
        if not self.active:
            return False
        self._heard = self._clock()
        if self.silent:
            self.silent = False
            _log.info("%s: the control plane responds again", self.name)
        match message:
            case m.Welcome():
                return self._welcome(message)
            case m.Members():
                return self._update(message)
            case m.Unknown():
                # The server restarted or dropped us: register again.
                self.joined = False
                self.speak_now()
                return False
            case m.Wait():
                self.waiting = message.reason
                return False
            case m.Refused():
                self.refused = message.reason
                self.joined = False
                _log.error("%s", message.reason)
                return True
            case m.Closing():
                self.stopping = self.stopping or message.stop_members
                _log.info(
                    "%s: %s",
                    self.name,
                    "the operator ended the deployment"
                    if message.stop_members
                    else "the control plane stops; continuing with the last known members",
                )
                return True
            case m.Beat() | m.Agreement() | m.Hosts():
                return False

    def check_silence(self) -> None:
        """Logs once per outage that the server is silent. The snapshot stays."""
        silence = self._clock() - self._heard
        if self.joined and not self.silent and silence > self.timing.timeout_s:
            self.silent = True
            _log.warning(
                "%s: the control plane is silent for %.1f s; continuing with known members",
                self.name,
                silence,
            )

    def set_state(self, state: m.State) -> None:
        """Advances to a state; ValueError if it is unknown or earlier than the current one."""
        if state not in m.STATES:
            raise ValueError(f"member state {state!r} is not one of {', '.join(m.STATES)}")
        if m.STATES.index(state) < m.STATES.index(self.state):
            raise ValueError(f"{self.name} is {self.state} and cannot become {state} again")
        if state != self.state:
            self.state = state
            self.speak_now()

    def renew(self) -> None:
        """Leaves and registers again at once; does nothing while not registered."""
        if self.joined:
            self._renewing = True
            self.speak_now()

    def report_move(self, number: int, fault: str = "") -> None:
        """Reports that all expert moves up to ``number`` are done, and why the next one failed."""
        if (number, fault) != (self.moves, self.move_fault):
            self.moves, self.move_fault = number, fault
            self.speak_now()

    def _welcome(self, welcome: m.Welcome) -> bool:
        if self.generation not in (0, welcome.generation):
            _log.warning(
                "%s had been dropped by the control plane and is back as generation %d (was %d)",
                self.name,
                welcome.generation,
                self.generation,
            )
        changed = not self.joined or self.generation != welcome.generation
        # Before the generation: readers of the new generation must see at least this snapshot.
        news = self._update(welcome.members)
        self.joined = True
        self.waiting = None
        self.generation = welcome.generation
        self._incarnation = welcome.incarnation
        self.timing = welcome.timing
        self._next = min(self._next, self._clock() + self.timing.interval_s)
        return news or changed

    def _update(self, members: m.Members) -> bool:
        if members == self.members:
            return False
        self.members = members
        return True
