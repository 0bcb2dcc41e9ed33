"""When to restart a dead role, and when to give up. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0


def backoff_s(
    deaths: Sequence[float], now: float, max_restarts: int, window_s: float
) -> float | None:
    """Seconds to wait before the next start, or None to give up.

    After the first death within ``window_s`` there is no wait; each further one doubles it.

    Args:
        deaths: times of all deaths of the role, the latest included, in seconds of the clock of
            ``now``. The caller subtracts the time that failed starts took.
    """
    recent = sum(1 for moment in deaths if now - moment <= window_s)
    if recent > max_restarts:
        return None
    return min(FIRST_BACKOFF_S * 2.0 ** (recent - 2), LONGEST_BACKOFF_S) if recent > 1 else 0.0
