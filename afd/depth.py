"""Chooses the depth of decode steps from measured step times (``pipeline.depth: auto``). Pure.

Steps are grouped by *bucket*: their number of rows, rounded up to a power of two. What another
micro-batch costs (the experts are read again) and what it hides both depend on the rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

AUTO = 0
"""Stands for a depth that is chosen from measured step times."""
GAIN = 0.03
"""A new depth must shorten steps by at least this share: step times of one depth vary by as much
from minute to minute."""

ROWS_PER_EXPERT = 256
"""Rows from which a GPU takes longer for an expert's products than for reading its weights: an H100
has 990 TFLOP/s in bfloat16 and 3.35 TB/s, so 295 operations per byte, and a row has one operation
per byte. Measured in docs/results/prefill_gpu.md."""


def bucket_of(rows: int) -> int:
    """Returns ``rows`` rounded up to a power of two."""
    return 1 << max(0, rows - 1).bit_length()


def depth_of(depths: Iterable[tuple[int, int]], rows: int, otherwise: int) -> int:
    """Returns the depth for ``rows`` rows from (bucket, depth) pairs, or ``otherwise``."""
    return dict(depths).get(bucket_of(rows), otherwise)


def prompt_depth(rows: int, experts: int, top_k: int, most: int) -> int:
    """Returns the depth of a step with prompts on GPUs, at most ``most``.

    Each micro-batch reads the weights of all experts. That hides behind their products only if an
    expert gets :data:`ROWS_PER_EXPERT` rows on average.

    Args:
        rows: of the step. experts, top_k: of a layer, and of a row.
    """
    return max(1, min(most, rows * top_k // (ROWS_PER_EXPERT * experts)))


@dataclass(frozen=True)
class DepthChoice:
    """A chosen depth; ``reason``: why it changed, or why it did not."""

    depth: int
    reason: str


def choose(current: int, step_s: Mapping[int, float], target_s: float | None) -> DepthChoice:
    """Returns the depth to continue with.

    The depth does not change the rows of a step, so the shortest step gives both the best latency
    and the best throughput. A target therefore does not favour another depth; if it is missed, a
    gain below ``GAIN`` suffices to reach it.

    Args:
        step_s: by depth, seconds from one step's start to the next one's. Measured in turn;
            contains ``current``.
        target_s: target time per output token; None: as short as possible.
    """
    now = step_s[current]
    best = min(step_s, key=lambda depth: (step_s[depth], depth))
    if target_s is not None and now > target_s >= step_s[best]:
        return DepthChoice(best, "meets the target")
    if step_s[best] < now * (1 - GAIN):
        return DepthChoice(best, f"steps are {1 - step_s[best] / now:.0%} shorter")
    for depth in sorted(step_s):
        if depth < current and step_s[depth] <= now:
            return DepthChoice(depth, "as short with fewer micro-batches")
    return DepthChoice(current, f"no other depth is {GAIN:.0%} shorter")


def worth_trying(current: int, other: int, waited: Iterable[float]) -> bool:
    """Whether ``other`` may be better than ``current``, judging by stage times at ``current``.

    A greater depth hides waiting and adds work, so it gains at most the share of time that the
    busiest process waits. A smaller depth saves expert reads, which no measurement at another depth
    shows, so it is always worth trying.

    Args:
        waited: for every process of both sides, wait / (wait + work); empty if not measured.
    """
    return other < current or min(waited, default=1.0) > GAIN
