"""Chooses between broadcast and routed dispatch. Pure functions.

Broadcast sends every row to all FFN instances; routed dispatch sends it to those that hold one of
its experts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

Dispatch = Literal["broadcast", "routed"]

ROUTED_BELOW = 0.75
"""``auto`` chooses routed dispatch if it sends at most this share of broadcast's bytes. The margin
covers costs besides bytes: rows are gathered and scattered, their number depends on the data, and
every instance holds the whole shared experts."""


def instances_per_row(held: Sequence[int], top_k: int) -> float:
    """Returns the expected number of FFN instances that hold at least one expert of a row.

    Args:
        held: number of experts on each instance; copies do not count.
        top_k: distinct experts of a row, all equally likely.
    """
    total = sum(held)
    ways = math.comb(total, top_k)
    return sum(1.0 - math.comb(total - here, top_k) / ways for here in held)


def row_bytes(dispatch: Dispatch, held: Sequence[int], top_k: int, each: float) -> float:
    """Returns the bytes of one row of one layer on the wire: A2F plus F2A, all FFN instances.

    Args:
        each: A2F plus F2A bytes of one row between one attention and one FFN instance.
    """
    return each * (len(held) if dispatch == "broadcast" else instances_per_row(held, top_k))


def cheaper_dispatch(held: Sequence[int], top_k: int, each: float = 1.0) -> Dispatch:
    """Returns the value of ``wire.dispatch: auto``; see ROUTED_BELOW."""
    routed = row_bytes("routed", held, top_k, each)
    broadcast = row_bytes("broadcast", held, top_k, each)
    return "routed" if routed <= ROUTED_BELOW * broadcast else "broadcast"


def rows_of_instances(
    slots: Sequence[Sequence[int]], bounds: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the rows that each instance receives under routed dispatch, ascending.

    A reference for tests of attention_worker/remote/dispatch.py.

    Args:
        slots: [rows][top_k], the expert slot that computes each of a row's experts; -1: none.
        bounds: instance j holds the slots [bounds[j], bounds[j + 1]).
    """
    shares: list[list[int]] = [[] for _ in bounds[1:]]
    for row, of_row in enumerate(slots):
        for instance in sorted({bisect_right(bounds, slot) - 1 for slot in of_row if slot >= 0}):
            shares[instance].append(row)
    return tuple(tuple(share) for share in shares)
