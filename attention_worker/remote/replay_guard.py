"""Judges replayed steps, and runs those again in which an FFN rank died.

A replay runs without the host. If an FFN rank dies in it, the stream would wait forever; a guard of
the transport then rings the missing doorbells, and the output of the step is garbage. Garbage must
not become a token, and with ``pipeline.lookahead`` the host has gone on by then: sampling and the
inputs of the next step are queued behind the replay. So the guard first closes a hold behind it.
What is queued there waits, the inputs of the step are as they were, and the step runs again on
another stream, message by message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Timer
from typing import TypeVar

from afd.errors import DeadlineExceeded, PeerLost
from afd.metrics.step_trace import StageTimestamps
from afd.wire.streams_torch import Streams
from afd_comm import Guard, Hold, Region, Status
from attention_worker.remote.host import RemoteExperts
from attention_worker.remote.observer import ReplayObserver
from attention_worker.remote.sessions import FfnSession, run_alone
from attention_worker.remote.stream import Waits

_Peer = TypeVar("_Peer")

_LIMIT = 3
"""A step is run again within this multiple of the deadline: waiting for the FFN rank and running
may each take one."""


@dataclass(frozen=True)
class ReplaySettings:
    """deadline_s: ``deadlines.ffn_s``. lookahead: vLLM goes on while a replayed step runs, if the
    transport allows it (:func:`attention_worker.remote.sessions.run_alone`)."""

    deadline_s: float
    lookahead: bool


@dataclass(frozen=True)
class CapturedStep:
    """A captured step. waits: the doorbells it waits for. timestamps: of its last replay.
    kept_alive: what the graph reads, here vLLM's attention metadata. rows_sent: of its last replay;
    see :attr:`attention_worker.remote.stream.StreamExperts.rows_sent`."""

    depth: int
    waits: Waits
    timestamps: StageTimestamps
    kept_alive: object
    rows_sent: Callable[[], Sequence[int]]


class ReplayGuard:
    """Waits for replayed steps, one at a time, in a thread of its own.

    Attributes:
        running: with lookahead, the last replayed step until it is waited for; else None. Its
            result comes once the output of the step is good, or its error.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        host: RemoteExperts,
        region: Region,
        streams: Streams,
        observer: ReplayObserver,
        enter: Callable[[], None],
    ) -> None:
        """enter: gives the calling thread the device and a stream of its own."""
        self._settings = settings
        self._host = host
        self._region = region
        self._streams = streams
        self.observer = observer
        self.running: Future[None] | None = None
        self._hold = Hold(region.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guard", initializer=enter)
        self._thread.submit(int).result()  # the stream: a driver may make none while one waits

    def watch(self, step: CapturedStep, again: Callable[[], None]) -> None:
        """Guards the replay that was just queued.

        Without lookahead its output is good when the call returns. With lookahead the call returns
        at once and sets :attr:`running`. Until that is done, only streams may use the output.

        Args:
            again: runs the step in host form, waits for its end, and writes the output where the
                replay does. Called in another thread, with a stream of its own, while the stream of
                the step is held. What it calls must have run before: see ``Hold``.

        Raises:
            DeadlineExceeded, PeerLost: as :meth:`wait_for_step`.
        """
        waits = step.waits
        ahead = self._settings.lookahead and run_alone(self._region, self._host.peers)
        # A hold keeps the device from being idle, and calls of the driver wait for that.
        hold = self._hold if ahead else None
        guard = self._region.guard(self._streams.compute, waits.slots, waits.flags, hold)
        self.running = self._thread.submit(self._settle, guard, step, again, hold)
        if not ahead:
            self.wait_for_step()

    def wait_for_step(self) -> None:
        """Waits until the output of the running step is good, if there is one.

        Raises:
            DeadlineExceeded: an FFN rank neither answered nor came back in ``deadlines.ffn_s``.
            PeerLost: the step could not be run again. The engine has to end in both cases.
        """
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def _settle(
        self, guard: Guard, step: CapturedStep, again: Callable[[], None], hold: Hold | None
    ) -> None:
        """Waits for the replay, and runs the step again if an FFN rank died in it."""
        try:
            gone = self._gone(guard.wait(int(self._settings.deadline_s * 1e6)))
            if gone:
                self._run_again(gone, step.depth, again, hold)
            else:
                self._host.end_replay(step.rows_sent())
                self.observer.finished(step.timestamps, step.depth)
        finally:
            if hold is not None:
                hold.open()  # also behind an error, or the engine could not end

    def _run_again(
        self,
        gone: Sequence[FfnSession],
        depth: int,
        again: Callable[[], None],
        hold: Hold | None,
    ) -> None:
        """Runs the step in host form. It writes the same keys and values to the same places."""
        # Freeing a link unmaps memory, and the driver does that on an idle device only.
        links = self._host.links
        with nullcontext() if hold is None else self._limited(hold, _names(gone)):
            self._host.reconnect([peer.rank for peer in gone])
            self._host.begin_step(depth)
            again()
        del links

    @contextmanager
    def _limited(self, hold: Hold, gone: str) -> Iterator[None]:
        """Opens the hold if the block takes too long: a call of the driver that waits for the
        device returns then. Raises PeerLost at the end of such a block."""
        limit_s = _LIMIT * self._settings.deadline_s
        timer = Timer(limit_s, hold.open)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if not hold.closed:
            raise PeerLost(
                f"a step in which {gone} died was not run again within {limit_s:g} s;"
                " the engine ends; report this with its log, and turn pipeline.lookahead off"
            )

    def _gone(self, statuses: Sequence[Status]) -> tuple[FfnSession, ...]:
        """Returns the sessions with the FFN ranks that died in a step.

        Raises:
            DeadlineExceeded: one is late.
        """
        gone, late = failed_peers(statuses, self._host.peers)
        if late:
            raise DeadlineExceeded(
                f"{_names(late)} did not answer a step within"
                f" {self._settings.deadline_s:g} s; look at its log, or raise deadlines.ffn_s if"
                " its experts are that slow"
            )
        return gone


def _names(peers: Sequence[FfnSession]) -> str:
    return ", ".join(peer.id for peer in peers)


def failed_peers(
    statuses: Sequence[Status], peers: Sequence[_Peer]
) -> tuple[tuple[_Peer, ...], tuple[_Peer, ...]]:
    """Returns the FFN ranks that are (gone, late) in a replayed step.

    Args:
        statuses: of the waits of the step; each wait has one per FFN rank, in order.
        peers: the FFN ranks of the step, in this order.
    """

    if statuses.count(Status.OK) == len(statuses):  # thousands, so this matters
        return (), ()

    def which(wanted: Status) -> tuple[_Peer, ...]:
        count = len(peers)
        failed = {i % count for i, status in enumerate(statuses) if status == wanted}
        return tuple(peers[i] for i in sorted(failed))

    return which(Status.PEER_GONE), which(Status.DEADLINE)
