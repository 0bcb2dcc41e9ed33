"""Judges replayed steps: complete, to be run again, or lost.

A replay runs without the host. If an FFN rank dies in it, the stream would wait forever; a guard of
the transport then rings the missing doorbells, and the output of the step is garbage. Garbage must
not become a token, so every replay is judged before vLLM samples from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from afd.errors import DeadlineExceeded, PeerLost
from afd.metrics.step_trace import StageTimestamps
from afd.wire.streams_torch import Streams
from afd_comm import Region, Status
from attention_worker.remote.host import RemoteExperts
from attention_worker.remote.observer import ReplayObserver
from attention_worker.remote.stream import Waits


@dataclass(frozen=True)
class ReplaySettings:
    """deadline_s: ``deadlines.ffn_s``. lookahead: ``pipeline.lookahead``; vLLM prepares the next
    step while a replayed one runs."""

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


class RunningStep:
    """A replayed step that may still run on the GPU while the host continues.

    A thread waits for it, so that its streams are freed at the deadline whatever vLLM does.
    """

    def __init__(
        self, statuses: Future[list[Status]], judge: Callable[[Sequence[Status]], None]
    ) -> None:
        self._statuses = statuses
        self._judge = judge
        # vLLM fetches the tokens of a step in one thread while the engine begins the next step.
        self._lock = threading.Lock()

    def wait_for_step(self) -> None:
        """Waits until the step is complete. Its output is valid only after that.

        Raises:
            DeadlineExceeded, PeerLost: the step failed. Its inputs are already overwritten, so it
                cannot be run again, and the engine has to end.
        """
        statuses = self._statuses.result()
        with self._lock:
            self._judge(statuses)
            self._judge = _already_judged


def _already_judged(statuses: Sequence[Status]) -> None:
    """Accepts the statuses of a step that was judged before."""


class ReplayGuard:
    """Waits for replayed steps and judges them.

    Attributes:
        running: with lookahead, the last replayed step until it is waited for; else None.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        host: RemoteExperts,
        region: Region,
        streams: Streams,
        observer: ReplayObserver,
    ) -> None:
        self._settings = settings
        self._host = host
        self._region = region
        self._streams = streams
        self.observer = observer
        self.running: RunningStep | None = None
        self._watcher = (
            ThreadPoolExecutor(1, thread_name_prefix="guard") if settings.lookahead else None
        )

    def passes(self, step: CapturedStep) -> bool:
        """Guards the replay that was just queued. Returns whether its output may be used.

        Without lookahead the call waits for the step. It returns False if an FFN rank died in the
        step and is back now; the caller then runs the step again, which writes the same keys and
        values to the same places. With lookahead it returns True at once and sets
        :attr:`running`.

        Raises:
            DeadlineExceeded: an FFN rank neither answered nor came back in ``deadlines.ffn_s``.
        """
        guard = self._region.guard(self._streams.compute, step.waits.slots, step.waits.flags)
        timeout_us = int(self._settings.deadline_s * 1e6)
        if self._watcher is not None:
            judge = partial(self._judge_last_chance, step)
            self.running = RunningStep(self._watcher.submit(guard.wait, timeout_us), judge)
            return True
        gone = self._gone(guard.wait(timeout_us))
        self._host.reconnect(gone)
        if gone:
            return False
        self._finish(step)
        return True

    def wait_for_step(self) -> None:
        """Waits for the running step, if there is one; see :meth:`RunningStep.wait_for_step`."""
        running, self.running = self.running, None
        if running is not None:
            running.wait_for_step()

    def _judge_last_chance(self, step: CapturedStep, statuses: Sequence[Status]) -> None:
        """Judges a step that cannot be run again."""
        gone = self._gone(statuses)
        if gone:
            raise PeerLost(
                f"{self._names(gone)} died in a step that cannot be run again because"
                " pipeline.lookahead is on; the engine ends and its requests are lost; turn"
                " pipeline.lookahead off to survive this"
            )
        self._finish(step)

    def _finish(self, step: CapturedStep) -> None:
        self._host.end_replay(step.rows_sent())
        self.observer.finished(step.timestamps, step.depth)

    def _gone(self, statuses: Sequence[Status]) -> tuple[int, ...]:
        """Returns the FFN ranks that died in a step. Raises DeadlineExceeded if one is late."""
        gone, late = failed_peers(statuses, len(self._host.peers))
        if late:
            raise DeadlineExceeded(
                f"{self._names(late)} did not answer a step within"
                f" {self._settings.deadline_s:g} s; look at its log, or raise deadlines.ffn_s if"
                " its experts are that slow"
            )
        return gone

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._host.peers[j].id for j in ranks)


def failed_peers(statuses: Sequence[Status], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the numbers of the FFN ranks that are (gone, late) in a replayed step.

    Args:
        statuses: of the waits of the step; each wait has one per FFN rank, in order.
        count: number of FFN ranks.
    """

    if statuses.count(Status.OK) == len(statuses):  # thousands, so this matters
        return (), ()

    def which(wanted: Status) -> tuple[int, ...]:
        return tuple(sorted({i % count for i, status in enumerate(statuses) if status == wanted}))

    return which(Status.PEER_GONE), which(Status.DEADLINE)
