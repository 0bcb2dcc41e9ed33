"""Ends an FFN process whose loop hangs in an expert call.

The heartbeats of such a process go on, so nobody else can tell it from a busy one. The supervisor
ends a process that stalls as a whole.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

_CHECK_EVERY_S = 1.0
_STALL_S = 2.0
"""If two checks are further apart, the whole process was stopped in between."""


@dataclass(frozen=True)
class RunningCall:
    """An expert call in progress. first: the first of this layer and size, so it may compile."""

    layer: int
    rows: int
    first: bool


def size_class(layer: int, rows: int) -> tuple[int, int]:
    """Calls of one class use the same kernels in most backends: those choose kernels by the power
    of two to which the rows are padded."""
    return layer, (max(rows, 1) - 1).bit_length()


class CallClock:
    """Shows the call that the loop is in. The loop's thread sets it, any thread reads it. Waiting
    for rows is not a call."""

    def __init__(self) -> None:
        self.current: RunningCall | None = None
        self._known: set[tuple[int, int]] = set()

    def begin(self, layer: int, rows: int) -> None:
        size = size_class(layer, rows)
        self.current = RunningCall(layer, rows, size not in self._known)
        self._known.add(size)

    def end(self) -> None:
        self.current = None

    def running(self, layer: int, rows: int) -> "CallClock":
        """Begins a call; the returned context manager ends it."""
        self.begin(layer, rows)
        return self

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


class HungCallWatch:
    """Measures the call that a clock shows. ``check`` is not thread-safe."""

    def __init__(self, clock: CallClock, *, limit_s: float, first_limit_s: float) -> None:
        """limit_s: the longest time that a call may take, seconds; first_limit_s: the same for the
        first call of a size, which may compile."""
        self._clock = clock
        self._limit_s = limit_s
        self._first_limit_s = max(first_limit_s, limit_s)
        self._watched: RunningCall | None = None
        self._running_s = 0.0
        self._checked = 0.0

    def check(self, now: float) -> str | None:
        """Returns a sentence about the hung call, or None. ``now``: s, monotonic clock.

        Counts the time between two checks that find the same call. If they are more than
        ``_STALL_S`` apart, the process was stopped, and the time does not count.
        """
        elapsed, self._checked = now - self._checked, now
        call = self._clock.current
        if call is None or call is not self._watched:
            self._watched, self._running_s = call, 0.0
            return None
        if elapsed <= _STALL_S:
            self._running_s += elapsed
        if self._running_s <= (self._first_limit_s if call.first else self._limit_s):
            return None
        return (
            f"an expert call has hung for {self._running_s:.0f} s (layer {call.layer},"
            f" {call.rows} rows); the process exits, to be restarted. If calls are that slow, raise"
            " deadlines.stuck_s"
        )

    def start(self, end: Callable[[str], object]) -> None:
        """Checks on a thread of its own, until it has called ``end`` with the sentence."""
        threading.Thread(target=self._run, args=(end,), name="afd-hung-call", daemon=True).start()

    def _run(self, end: Callable[[str], object]) -> None:
        while (sentence := self.check(time.monotonic())) is None:
            time.sleep(_CHECK_EVERY_S)
        end(sentence)
