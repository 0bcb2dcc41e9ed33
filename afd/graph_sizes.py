"""Which sizes of decode steps are captured as graphs, on both sides. Pure.

An attention instance pads a decode step to the next size in :func:`captured_rows`. So the FFN side
knows every step that can be announced, and captures all graphs before it serves. An FFN graph does
not depend on who takes part in a step: it has room for the same number of rows, its *bucket*, from
every attention instance in each micro-batch, and masks the rows that were not sent. The contract
carries the buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from afd.schedule import split_rows

MOST_ROWS = 512
"""Rows of the largest captured step; vLLM's own limit (vllm/config/vllm.py:
_set_cudagraph_sizes)."""


def captured_rows(max_requests: int, rows_each: int = 1) -> tuple[int, ...]:
    """Returns the rows of the decode steps that an attention instance captures, ascending.

    This is vLLM's own list, but it ends at the largest decode step. With speculation it has
    multiples of ``rows_each`` only, because vLLM replays steps in which every request has all its
    drafts (vllm/config/compilation.py: adjust_cudagraph_sizes_for_spec_decode).

    Args:
        rows_each: rows of one request in a decode step.
    """
    most = min(max_requests, MOST_ROWS // rows_each)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most, 16)]
    return tuple(rows_each * size for size in (*[size for size in sizes if size < most], most))


@dataclass(frozen=True)
class GraphSizes:
    """The graphs of an FFN rank.

    buckets: for depth 1, 2, ...: the rows of one attention instance in one micro-batch, ascending.
    """

    buckets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sizes: Sequence[int], max_depth: int, min_rows: int) -> GraphSizes:
        """Chooses the buckets for steps of these sizes.

        At most four buckets per power of two: a bucket is up to a quarter larger than the rows,
        which costs little because no expert computes masked rows, and fewer graphs take less time
        to capture and less memory.

        Args:
            sizes: from :func:`captured_rows`.
            min_rows: ``pipeline.min_rows``; a step with fewer rows per micro-batch is not split.
        """
        one = sizes[0] if sizes else 1  # rows of one request
        kept = [size for size in sizes if _is_round(size // one) or size == sizes[-1]]
        return cls(tuple(_of_depth(kept, sizes, d, min_rows) for d in range(1, max_depth + 1)))

    def bucket_of(self, steps: Iterable[tuple[int, int]]) -> int:
        """Returns the smallest bucket with room for (rows, depth) of every attention instance of a
        step; 0: there is none."""
        most = deepest = 0
        for rows, depth in steps:
            # afd.schedule.split_rows: the last micro-batch is the largest.
            largest = rows - (depth - 1) * (rows // depth)
            if largest > most:
                most = largest
            if depth > deepest:
                deepest = depth
        buckets = self.buckets[deepest - 1] if self.buckets else ()
        at = bisect_left(buckets, most)
        return buckets[at] if at < len(buckets) else 0

    def all(self) -> list[tuple[int, int]]:
        """Returns (bucket, depth) of every graph, the largest first: graphs share memory, and the
        largest ones need the most."""
        found = [(size, d) for d, sizes in enumerate(self.buckets, start=1) for size in sizes]
        return sorted(found, reverse=True)

    @property
    def largest(self) -> list[int]:
        """By micro-batch, the largest bucket of the depths that have it."""
        tops = [sizes[-1] if sizes else 0 for sizes in self.buckets]
        return [max(tops[micro_batch:]) for micro_batch in range(len(tops))]


def _is_round(size: int) -> bool:
    """Whether only the first three binary digits of a number are not 0."""
    return size % (1 << max(0, size.bit_length() - 3)) == 0


def _of_depth(
    kept: Sequence[int], sizes: Sequence[int], depth: int, min_rows: int
) -> tuple[int, ...]:
    if depth == 1:
        return tuple(kept)
    largest = [split_rows(size, depth)[-1] for size in sizes if size // depth >= min_rows]
    if not largest:
        return ()
    low, high = bisect_left(kept, min(min_rows, kept[-1])), bisect_left(kept, max(largest))
    return tuple(kept[low : high + 1])
