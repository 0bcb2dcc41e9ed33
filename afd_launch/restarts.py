"""When to restart a dead role, and when to give up. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0


def recent(deaths: Sequence[float], now: float, window_s: float) -> list[float]:
    """Returns the deaths that count: those within ``window_s`` seconds."""
    return [moment for moment in deaths if now - moment <= window_s]


def backoff_s(
    deaths: Sequence[float], now: float, max_restarts: int, window_s: float
) -> float | None:
    """Seconds to wait before the next start, or None to give up.

    After the first death within ``window_s`` there is no wait; each further one doubles it.

    Args:
        deaths: times of all deaths of the role, the latest included, in seconds of the clock of
            ``now``. The caller subtracts the time that failed starts took.
    """
    count = len(recent(deaths, now, window_s))
    if count > max_restarts:
        return None
    return min(FIRST_BACKOFF_S * 2.0 ** (count - 2), LONGEST_BACKOFF_S) if count > 1 else 0.0
