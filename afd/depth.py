"""How many micro-batches a decode step runs at where measured step times decide. Pure.

Steps are told apart by *bucket*, the power of two that their rows fit into: what another
micro-batch costs (the experts are read once more) and what it hides depend on the rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

AUTO = 0
"""In the place of a depth: chosen from measured step times."""
GAIN = 0.03
"""A depth is given up for one whose steps are shorter by this share, and not for less: step times
of one depth differ by as much from minute to minute."""


def bucket_of(rows: int) -> int:
    """The power of two that ``rows`` rows fit into."""
    return 1 << max(0, rows - 1).bit_length()


def depth_of(depths: Iterable[tuple[int, int]], rows: int, otherwise: int) -> int:
    """Depth of a step of ``rows`` rows by (bucket, depth) pairs; ``otherwise``: without a pair."""
    return dict(depths).get(bucket_of(rows), otherwise)


@dataclass(frozen=True)
class Choice:
    """reason: why it is another depth than before, or why it is the same."""

    depth: int
    reason: str


def choose(current: int, step_s: Mapping[int, float], target_s: float | None) -> Choice:
    """The depth to go on at.

    The rows of a step are what the scheduler has, whatever the depth: the shortest step is the best
    latency and the best throughput. So the target does not ask for another depth than throughput
    does; a missed one only lets a smaller gain do.

    Args:
        step_s: seconds from one step to the next, by depth, measured one after the other;
            ``current`` is among them.
        target_s: time per output token that is asked for; None: as short as can be.
    """
    now = step_s[current]
    best = min(step_s, key=lambda depth: (step_s[depth], depth))
    if target_s is not None and now > target_s >= step_s[best]:
        return Choice(best, "meets the target")
    if step_s[best] < now * (1 - GAIN):
        return Choice(best, f"steps are {1 - step_s[best] / now:.0%} shorter")
    for depth in sorted(step_s):
        if depth < current and step_s[depth] <= now:
            return Choice(depth, "as short with fewer micro-batches")
    return Choice(current, f"no other depth is {GAIN:.0%} shorter")


def worth_trying(current: int, other: int, waited: Iterable[float]) -> bool:
    """Whether ``other`` may be the better depth, by the stage times at ``current``.

    A deeper split hides waiting and adds work, so that it cannot gain more than the share of its
    time that the busiest process waits. What a shallower one saves, the work of reading experts for
    fewer micro-batches, shows at no other depth: it has to be tried.

    Args:
        waited: by process of both sides, its wait for the other side as a share of both its wait
            and its work; empty where nothing timed them.
    """
    return other < current or min(waited, default=1.0) > GAIN
