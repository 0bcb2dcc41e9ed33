"""Which roles stand still: a process that is there, but whose heartbeats the control plane misses.

The control plane forgets such a member after ``control.timeout_s``; whoever started the process is
the only one who can end it. One that merely stumbled registers again by itself, so it gets time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

LOOK_S = 1.0
RETURN_S = 5.0
"""How long a role that the control plane has forgotten may take to register again, seconds."""
_PAUSE_S = 2.0  # between two looks: longer, and it was us who stood still

#: Whether the role of this name is a member; None where the control plane cannot say.
IsMember = Callable[[str], bool | None]


class Standstill:
    """Counts for how long each role has been no member. Not thread-safe."""

    def __init__(self, is_member: IsMember) -> None:
        self._is_member = is_member
        self._absent: dict[str, float] = {}  # seconds
        self._looked: float | None = None

    def look(self, names: Iterable[str], now: float) -> list[str]:
        """Which of these running roles have been no member for ``RETURN_S``, each told once per
        ``RETURN_S``. Call it often; it looks every ``LOOK_S``. ``now``: s, monotonic clock.

        Time in which the control plane cannot say, or between two calls far apart, does not count.
        """
        elapsed = 0.0 if self._looked is None else now - self._looked
        if self._looked is not None and elapsed < LOOK_S:
            return []
        self._looked = now
        if elapsed > _PAUSE_S:
            elapsed = 0.0
        # the first look that misses a role is where its time begins
        self._absent = {
            name: self._absent[name] + elapsed if name in self._absent else 0.0
            for name in names
            if self._is_member(name) is False
        }
        still = [name for name, absent_s in self._absent.items() if absent_s >= RETURN_S]
        for name in still:
            del self._absent[name]
        return still
