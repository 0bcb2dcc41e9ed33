"""How a decode attention launch is split into programs. Pure: imports no torch."""

from dataclasses import dataclass

MAX_SPLITS = 64
"""Largest number of parts of one request's cache. One program of the second launch adds them up."""

PER_PROCESSOR = 2
"""Programs that run side by side on a Hopper multiprocessor: while one multiplies, the other loads
and computes exponentials."""


@dataclass(frozen=True)
class DecodePlan:
    """Constants of the kernels in :mod:`attention_worker.kernels.decode`.

    block: query heads per program. tile: tokens per iteration. splits: programs that share the
    cache of one request. warps: per program, of 32 or 64 lanes. stages: tiles being loaded at once.
    """

    block: int
    tile: int
    splits: int
    warps: int
    stages: int


def plan_decode(
    requests: int,
    kv_heads: int,
    group: int,
    dim: int,
    element: int,
    processors: int,
    hip: bool = False,
) -> DecodePlan:
    """Returns the plan for a decode batch.

    It depends on the shape only, never on lengths: a captured graph keeps it while requests grow.

    Args:
        group: query heads per key/value head.
        dim: size of a head.
        element: bytes of a cache element.
        processors: multiprocessors of the device.
        hip: an AMD device; some of these have only 64 KiB of shared memory per program.
    """
    block = 16 if group <= 16 else 64  # rows of the matrix instructions
    programs = max(1, requests * kv_heads * -(-group // block))
    return DecodePlan(
        block=block,
        tile=min(64, 16384 // (dim * element)),
        splits=min(MAX_SPLITS, max(1, PER_PROCESSOR * processors // programs)),
        warps=4,
        stages=2 if hip else 3,
    )
