"""How transfers share links: pure functions over numpy arrays of seconds.

The rules (:mod:`afd_planner.simulate.events` applies them message by message):

- A stage of a micro-batch sends its messages to all receivers as one burst. They share the sending
  link in proportion to their size, so all end when the link has sent all bytes. A sending link
  sends one burst after the other.
- The first byte of a message arrives ``latency`` after its burst began.
- A receiving link receives the messages of one (layer, micro-batch) one after the other, in the
  order of their first bytes, and then those of the next.
- A message is complete when the receiving link has received it, but not earlier than ``latency``
  after its burst ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afd_planner.cost.interpolate import Array


def drained(first: Array, each: Array, free: float) -> float:
    """Returns the moment at which a link has received n messages, in order of their first bytes.

    Args:
        first: [n] arrival of the first byte of each message.
        each: [n] time that the link needs for each message.
        free: Moment at which the link has received all earlier messages.
    """
    total = float(each.sum())
    # Ignores messages too early to delay the end: all later ones would finish within ``bound``.
    bound = max(free + total, float(first.max()))
    late = np.flatnonzero(first + total > bound)
    if late.size == 0:
        return bound
    order = late[np.argsort(first[late], kind="stable")]
    behind = np.cumsum(each[order][::-1])[::-1]
    return max(free + total, float((first[order] + behind).max()))


@dataclass(frozen=True)
class Receivers:
    """Receiving links of m instances.

    Attributes:
        each: [m] seconds per message.
        sizes: Distinct values of ``each``, ascending.
        which: [m] indices into ``sizes``.
    """

    each: Array
    sizes: Array
    which: NDArray[np.intp]

    @classmethod
    def of(cls, each: Array) -> Receivers:
        sizes, which = np.unique(each, return_inverse=True)
        return cls(each, sizes, which)


def drained_each(first: Array, receivers: Receivers, free: Array) -> Array:
    """:func:`drained` for m receiving links, each of which gets one message from each of n senders.

    All messages to one receiver have the same size. With senders sorted by arrival, receiver i ends
    at the maximum over j of first[j] + (n - j) * each[i]. These are straight lines in each[i]. Only
    the lines between the maximum at the smallest and at the largest each[i] can be the maximum
    anywhere in between, so only those are evaluated.

    Args:
        first: [n] arrival of the first byte from each sender, the same at all receivers.
        free: [m] moment at which each receiving link is free.
    """
    if first.size == 1:
        return np.asarray(np.maximum(free, first[0]) + receivers.each)
    arrivals = np.sort(first)
    behind = np.arange(first.size, 0, -1, dtype=float)
    sizes = receivers.sizes
    ends = (int(np.argmax(arrivals + behind * size)) for size in (sizes[0], sizes[-1]))
    low, high = sorted(ends)
    done = np.full(sizes.size, -np.inf)
    for sender in range(low, high + 1):
        np.maximum(done, arrivals[sender] + behind[sender] * sizes, out=done)
    return np.asarray(np.maximum(free + first.size * receivers.each, done[receivers.which]))
