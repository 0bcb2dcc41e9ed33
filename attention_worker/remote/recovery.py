"""What an attention instance does when FFN ranks are lost: renew sessions and send again.

An exception in ``forward`` would end the vLLM engine, and every request would lose its KV cache. So
the calls here block and retry until ``deadlines.ffn_s``. An FFN instance keeps no request state: a
restarted one gets the unanswered micro-batches again, and no request is lost.
"""

import logging
import time
from collections.abc import Sequence

from afd.errors import DeadlineExceeded
from afd_comm import Status
from attention_worker.remote.dispatcher import Dispatcher
from attention_worker.remote.observer import StepObserver
from attention_worker.remote.outbox import Outbox
from attention_worker.remote.sessions import FfnSessions

logger = logging.getLogger("afd.attention")

WAIT_SLICE_US = 200_000
"""Longest single wait for answers, microseconds. After it, lost FFN ranks are looked for."""
_GONE_PAUSE_S = 0.02
"""Pause after the transport reported a death: the control plane knows it a heartbeat later."""


class Recovery:
    """Keeps a step alive through lost FFN ranks, renewed sessions and lost messages.

    ``j`` is the number of an FFN rank (:func:`afd.topology.rank_number`).

    Not thread-safe: used by the model's forward only.
    """

    def __init__(
        self,
        sessions: FfnSessions,
        outbox: Outbox,
        dispatcher: Dispatcher,
        observer: StepObserver,
        deadline_s: float,
    ) -> None:
        self._sessions = sessions
        self._outbox = outbox
        self._dispatcher = dispatcher
        self._observer = observer
        self._deadline_s = deadline_s
        self._deadline = 0.0  # of the current wait, monotonic seconds
        self._slice_began = 0.0

    def renew_ended_sessions(self) -> None:
        """Renews, at the beginning of a step, every session that has ended. Before that, links to
        the FFN instances that compute experts now, and leaves those that no longer do.

        Raises:
            DeadlineExceeded: an FFN rank did not come back in ``deadlines.ffn_s``.
        """
        deadline = time.monotonic() + self._deadline_s
        if self._sessions.instances != self._dispatcher.slots.instances:
            self._use_instances(deadline)
        while self._renew_ended(self._sessions.ranks, deadline):
            pass  # another session may have ended meanwhile
        self._sessions.close_idle()

    def begin_wait(self) -> None:
        """Starts the deadline of one wait for answers."""
        self._slice_began = time.monotonic()
        self._deadline = self._slice_began + self._deadline_s

    def recover_missing(
        self, micro_batch: int, ranks: list[int], statuses: Sequence[Status]
    ) -> list[int]:
        """Recovers lost FFN ranks after one wait for the answers of ``ranks``: renews the sessions
        that have ended, and sends their unanswered micro-batches again.

        Returns the FFN ranks to wait for next; [] if all have answered.

        Args:
            statuses: result of the wait, one per rank.

        Raises:
            DeadlineExceeded: a rank neither answered nor came back in ``deadlines.ffn_s``.
        """
        if not self._outbox.unsent and all(status == Status.OK for status in statuses):
            return []
        # A wait longer than its slice means that this process was stopped: no FFN rank's fault.
        overrun_s = time.monotonic() - self._slice_began - WAIT_SLICE_US / 1e6
        self._deadline += max(0.0, overrun_s)
        waited = list(zip(ranks, statuses, strict=True))
        missing = {j for j, status in waited if status != Status.OK}
        gone = [j for j, status in waited if status == Status.PEER_GONE]
        self._sessions.note_unreachable({*self._outbox.unsent, *gone})
        missing |= self._renew_ended(sorted(missing), self._deadline)
        missing &= {*self._sessions.ranks}
        if gone:
            time.sleep(_GONE_PAUSE_S)
        if missing:
            self._slice_began = time.monotonic()
            if self._slice_began > self._deadline:
                raise DeadlineExceeded(
                    f"{self._names(sorted(missing))} did not answer layer "
                    f"{self._outbox.layer_of(micro_batch)} within {self._deadline_s:g} s; "
                    "look at its log, or raise deadlines.ffn_s if its experts are that slow"
                )
        return sorted(missing)

    def reconnect(self, lost: Sequence[int]) -> None:
        """Waits until the FFN ranks ``lost`` in a replayed step are back.

        Raises:
            DeadlineExceeded: one did not come back in ``deadlines.ffn_s``.
        """
        deadline = time.monotonic() + self._deadline_s
        before = {j: self._sessions.of(j) for j in lost}
        while waiting := [j for j in lost if self._sessions.of(j) is before[j]]:
            if not self._renew_ended(waiting, deadline):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{self._names(waiting)} cannot be reached; look at its log"
                    )
                self._sessions.note_unreachable(waiting)
                time.sleep(_GONE_PAUSE_S)

    def _renew_ended(self, ranks: Sequence[int], deadline: float) -> set[int]:
        """Renews the ended sessions among ``ranks``. Returns the ranks with a new session.

        If the control plane had given this instance up, all its sessions have ended. Meanwhile
        other roles went on and experts may have moved, so unanswered rows are dispatched again.
        """
        rejoined = self._sessions.rejoined()
        renewed: set[int] = set()
        if rejoined:
            self._dispatcher.adopt_in_step()
            renewed.update(self._use_instances(deadline))
            self._outbox.replace(
                [s if s is None else self._dispatcher.dispatch(s) for s in self._outbox.sources()]
            )
            for j in sorted(renewed, reverse=True):  # as in _resume_instance
                self._outbox.send_again(j)
            ended: Sequence[int] = self._sessions.ranks
        else:
            ended = [j for j in ranks if self._sessions.is_lost(j)]
        for j in ended:
            if j not in renewed:
                self._resume_instance(j, deadline, "rejoined" if rejoined else "lost")
                renewed.update(self._sessions.instance_of(j))
        return renewed

    def _use_instances(self, deadline: float) -> list[int]:
        """Uses the FFN instances that compute experts in the placement in use. Returns the ranks
        with which a session has begun."""
        new = self._sessions.use(self._dispatcher.slots.instances, deadline)
        for j in new:
            self._outbox.start_session(j, self._sessions.of(j))
        self._outbox.use(self._sessions.ranks)
        self._observer.connected(len(self._sessions.ranks))
        names = ", ".join(f"ffn-{j}" for j in self._sessions.instances)
        logger.info("the experts are on %s now", names)
        return new

    def _resume_instance(self, j: int, deadline: float, cause: str) -> None:
        """Renews the sessions of all ranks of the FFN instance of rank j.

        The ranks of an instance restart together and add up their partial results, so each of them
        needs the same micro-batches. Rank 0 comes last: the others look for what it has.
        """
        for k in reversed(self._sessions.instance_of(j)):
            self._resume(k, deadline, cause)

    def _resume(self, j: int, deadline: float, cause: str) -> None:
        logger.warning("%s is gone; waiting for it to come back", self._sessions.name(j))
        fresh = self._sessions.renew(j, deadline)
        self._outbox.start_session(j, fresh)
        self._observer.resumed(cause)
        self._outbox.send_again(j)
        logger.warning("%s is back (session %d); resumed", fresh.id, fresh.session)

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._sessions.name(j) for j in ranks)
