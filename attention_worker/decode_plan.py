"""How a decode attention launch is cut into programs. Pure: no torch."""

from dataclasses import dataclass

MAX_SPLITS = 64
"""Parts of one request's cache at most: what one program of the second stage adds up."""

PER_PROCESSOR = 2
"""Programs that fit beside each other on a Hopper multiprocessor: while one multiplies, the other's
loads and exponentials go on."""


@dataclass(frozen=True)
class DecodePlan:
    """Constants of the kernels in :mod:`attention_worker.kernels.decode`.

    block: query heads of a program; tile: tokens of a step; splits: programs that share a request's
    cache; warps, stages: of a program (warps of 32 or 64 lanes, tiles on their way from memory).
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
    """The plan for ``requests`` rows with ``group`` query heads per key/value head of ``dim``.

    By the shape alone and never by lengths: a captured graph keeps it while requests grow.

    Args:
        element: bytes of a cache element. processors: multiprocessors of the device.
        hip: an AMD device, of which some have 64 KiB of shared memory for a program.
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
