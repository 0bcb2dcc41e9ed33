"""When to start a dead role again, and when to give up. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0


def backoff_s(
    deaths: Sequence[float], now: float, max_restarts: int, window_s: float
) -> float | None:
    """Seconds to wait before the next start, or None to give up.

    ``deaths``: times of every death of the role so far, the latest included, on the clock of
    ``now`` (seconds), on which time between a death and another one in the start after it does not
    pass. Deaths older than ``window_s`` are forgiven; each recent one doubles the wait.
    """
    recent = sum(1 for moment in deaths if now - moment <= window_s)
    if recent > max_restarts:
        return None
    return min(FIRST_BACKOFF_S * 2 ** (recent - 1), LONGEST_BACKOFF_S)
