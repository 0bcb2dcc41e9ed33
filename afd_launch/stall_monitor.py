"""Detects stalled roles: the process lives, but the control plane gets no heartbeats from it.

The control plane drops such a member after ``control.timeout_s``. Only the supervisor that started
the process can end it. A role that was merely slow registers again by itself, so it gets some time.
Attention instances hold requests, so they count only once they have stopped listening, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

LOOK_S = 1.0
RETURN_S = 5.0
"""Seconds that a dropped role may take to register again."""
_PAUSE_S = 2.0  # a longer gap between two calls means that the supervisor itself was stopped

IsMember = Callable[[str], bool | None]
"""Whether the role of this name is registered; None if it is unknown, as without a control plane.

For attention roles, ``Readiness.is_serving``: registered or listening."""


class StallMonitor:
    """Measures for how long each role has not been registered. Not thread-safe."""

    def __init__(self, is_member: IsMember, return_s: float | None = None) -> None:
        """return_s: seconds that a role may take to come back; None: ``RETURN_S``."""
        self._is_member = is_member
        self.return_s = RETURN_S if return_s is None else return_s
        self._absent: dict[str, float] = {}  # seconds
        self._looked: float | None = None

    def stalled(self, names: Iterable[str], now: float) -> list[str]:
        """Returns the roles among ``names`` that have been unregistered for ``return_s``.

        Call it often: it checks every ``LOOK_S`` and returns a role once per ``return_s``. Time
        without an answer from the control plane, and gaps between calls of more than ``_PAUSE_S``,
        do not count.

        Args:
            names: running roles. now: seconds of the monotonic clock.
        """
        elapsed = 0.0 if self._looked is None else now - self._looked
        if self._looked is not None and elapsed < LOOK_S:
            return []
        self._looked = now
        if elapsed > _PAUSE_S:
            elapsed = 0.0
        # The first check that misses a role starts its time at 0.
        self._absent = {
            name: self._absent[name] + elapsed if name in self._absent else 0.0
            for name in names
            if self._is_member(name) is False
        }
        stalled = [name for name, absent_s in self._absent.items() if absent_s >= self.return_s]
        for name in stalled:
            del self._absent[name]
        return stalled
