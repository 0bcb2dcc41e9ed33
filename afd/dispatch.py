"""Which FFN instances a row is sent to: all, or those that compute one of its experts. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

Dispatch = Literal["broadcast", "routed"]

ROUTED_BELOW = 0.75
"""Routed dispatch is chosen where it carries at most this share of broadcast's bytes. It costs
what bytes do not count: rows are gathered and added into place, their number depends on the data,
and every instance holds whole shared experts."""


def instances_per_row(held: Sequence[int], top_k: int) -> float:
    """Expected number of FFN instances that hold one of a row's experts.

    Args:
        held: experts on each instance, each expert counted once. top_k: distinct experts of a row,
            all equally likely.
    """
    total = sum(held)
    ways = math.comb(total, top_k)
    return sum(1.0 - math.comb(total - here, top_k) / ways for here in held)


def row_bytes(dispatch: Dispatch, held: Sequence[int], top_k: int, each: float) -> float:
    """Bytes that one row of one layer costs on the wire, there and back, over all FFN instances.

    Args:
        each: bytes of a row there and back between one attention and one FFN instance.
    """
    return each * (len(held) if dispatch == "broadcast" else instances_per_row(held, top_k))


def cheaper_dispatch(held: Sequence[int], top_k: int, each: float = 1.0) -> Dispatch:
    """What ``wire.dispatch: auto`` takes; see ROUTED_BELOW."""
    routed = row_bytes("routed", held, top_k, each)
    broadcast = row_bytes("broadcast", held, top_k, each)
    return "routed" if routed <= ROUTED_BELOW * broadcast else "broadcast"


def rows_of_instances(
    slots: Sequence[Sequence[int]], bounds: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Rows that each instance gets, ascending: the reference of attention_worker/dispatch.py.

    Args:
        slots: [rows][top_k], the slot that computes each of a row's experts; -1: none does.
        bounds: instance j holds slots [bounds[j], bounds[j + 1]).
    """
    shares: list[list[int]] = [[] for _ in bounds[1:]]
    for row, of_row in enumerate(slots):
        for instance in sorted({bisect_right(bounds, slot) - 1 for slot in of_row if slot >= 0}):
            shares[instance].append(row)
    return tuple(tuple(share) for share in shares)
