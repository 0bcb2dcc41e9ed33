"""Ends an FFN process whose loop hangs in an expert call while its other threads go on.

Its heartbeats go on too, so nobody else can tell it from a busy one. A process that stands still as
a whole is its supervisor's to end (:mod:`afd.launch.standstill`).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_LOOK_S = 1.0
_PAUSE_S = 2.0  # between two looks: longer, and the whole process stood still


@dataclass(frozen=True)
class Current:
    """A call in progress. first: no call of this layer was of this size, so it may compile."""

    layer: int
    rows: int
    first: bool


def size_of(layer: int, rows: int) -> tuple[int, int]:
    """What most backends choose kernels by: the power of two up to which the rows are padded."""
    return layer, (max(rows, 1) - 1).bit_length()


class CallClock:
    """Which call the loop is in; set by its thread, read by any. Waits for rows are no call."""

    def __init__(self) -> None:
        self.current: Current | None = None
        self._known: set[tuple[int, int]] = set()

    def begin(self, layer: int, rows: int) -> None:
        size = size_of(layer, rows)
        self.current = Current(layer, rows, size not in self._known)
        self._known.add(size)

    def end(self) -> None:
        self.current = None


class CallWatch:
    """Measures the call that a clock shows. ``look`` is not thread-safe."""

    def __init__(self, clock: CallClock, *, stuck_s: float, first_s: float) -> None:
        """stuck_s: the longest that a call may take, seconds; first_s: one that may compile."""
        self._clock = clock
        self._stuck_s = stuck_s
        self._first_s = max(first_s, stuck_s)
        self._watched: Current | None = None
        self._inside_s = 0.0
        self._looked = 0.0

    def look(self, now: float) -> str | None:
        """Which call takes too long, in a sentence, or None. ``now``: s, monotonic clock.

        Time counts between looks that find the same call, but not where they are far apart.
        """
        elapsed, self._looked = now - self._looked, now
        call = self._clock.current
        if call is None or call is not self._watched:
            self._watched, self._inside_s = call, 0.0
            return None
        if elapsed <= _PAUSE_S:
            self._inside_s += elapsed
        if self._inside_s <= (self._first_s if call.first else self._stuck_s):
            return None
        return (
            f"stuck for {self._inside_s:.0f} s in the experts of layer {call.layer} over"
            f" {call.rows} rows; ending, to be started again (raise deadlines.stuck_s if they are"
            " that slow)"
        )

    def start(self, end: Callable[[str], object]) -> None:
        """Look from a thread of its own, until ``end`` has been called with the sentence."""
        threading.Thread(target=self._run, args=(end,), name="afd-stuck", daemon=True).start()

    def _run(self, end: Callable[[str], object]) -> None:
        while (sentence := self.look(time.monotonic())) is None:
            time.sleep(_LOOK_S)
        end(sentence)
