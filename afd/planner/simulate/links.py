"""How transfers share links. Pure functions over numpy arrays, seconds throughout.

The rules, which :mod:`afd.planner.simulate.events` follows message by message:

- What one stage of one micro-batch produces leaves its sender together: the messages to all
  receivers share the sending link in proportion to their size, so all of them end when the link has
  carried all their bytes. A sending link takes one such burst after the other.
- A message's first byte arrives ``latency`` after its burst began.
- A receiving link serves the messages of one (layer, micro-batch) in the order in which their first
  bytes arrive, one after the other, and those of the next only after all of them.
- A message is complete when the receiving link has carried it, and not before ``latency`` after its
  burst ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afd.planner.cost.interpolate import Array


def drained(first: Array, each: Array, free: float) -> float:
    """When a receiving link has carried messages that queue in the order of their first bytes.

    Args:
        first: [n] arrival of each message's first byte.
        each: [n] how long the link takes for it.
        free: when the link has finished what came before.
    """
    total = float(each.sum())
    # Whoever arrives so early that everything after it would be done by then changes nothing.
    bound = max(free + total, float(first.max()))
    late = np.flatnonzero(first + total > bound)
    if late.size == 0:
        return bound
    order = late[np.argsort(first[late], kind="stable")]
    behind = np.cumsum(each[order][::-1])[::-1]
    return max(free + total, float((first[order] + behind).max()))


@dataclass(frozen=True)
class Receivers:
    """Receiving links by how long each takes for one message. each: [m] seconds; sizes: the
    different ones among them, ascending; which: [m] indices into ``sizes``."""

    each: Array
    sizes: Array
    which: NDArray[np.intp]

    @classmethod
    def of(cls, each: Array) -> Receivers:
        return cls(each, *np.unique(each, return_inverse=True))


def drained_each(first: Array, receivers: Receivers, free: Array) -> Array:
    """:func:`drained` for many receiving links, each of which gets one message from every sender.

    The messages to one receiver are of one size. With senders sorted by arrival, receiver i is done
    at the largest of first[j] + (n - j) * each[i]: straight lines in each[i], of which only those
    between the best one for the smallest and for the largest receiver can be on top in between.

    Args:
        first: [n] first byte from each sender, the same at all receivers.
        free: [m] when each receiver's link is free.
    """
    if first.size == 1:
        return np.maximum(free, first[0]) + receivers.each
    arrivals = np.sort(first)
    behind = np.arange(first.size, 0, -1, dtype=float)
    sizes = receivers.sizes
    ends = (int(np.argmax(arrivals + behind * size)) for size in (sizes[0], sizes[-1]))
    low, high = sorted(ends)
    done = np.full(sizes.size, -np.inf)
    for sender in range(low, high + 1):
        np.maximum(done, arrivals[sender] + behind[sender] * sizes, out=done)
    return np.maximum(free + first.size * receivers.each, done[receivers.which])
