"""One thing to run: an expert call or a step on streams, and whose rows are in it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from afd.graph_sizes import GraphSizes
from afd.schedule import Position
from afd.wire.layout import Kind
from afd.wire.message import Received
from ffn_worker.pool.order_format import Order, Part, Parts
from ffn_worker.pool.peers import Peer

_new = tuple.__new__  # skips the constructor of a NamedTuple, which takes as long as the rest

Settled = Callable[[], int]
"""Returns the number of the last expert move that is complete for this process."""


class Sender(NamedTuple):
    """The sender of a part. request: the header of its request; None for an announced step."""

    peer: Peer
    request: Received | None


@dataclass(frozen=True)
class Call:
    """An order, and the sender of each of its parts.

    A sender is None if it was lost after the order was given. Its rows still count, because all
    ranks of an instance must add up the same rows; but no expert computes them, and nobody is
    answered.
    """

    order: Order
    senders: tuple[Sender | None, ...]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Of each part."""
        return tuple([part.rows for part in self.order.parts])

    @property
    def position(self) -> Position:
        return self.order.position

    @classmethod
    def of(cls, position: Position, senders: list[Sender]) -> "Call":
        """Returns an expert call over the requests of these senders."""
        parts = []
        for sender in senders:
            request, peer = sender.request, sender.peer
            assert request is not None
            row = request.rows, request.depth, request.moves, request.receivers, request.step
            parts.append(_new(Part, (peer.index, peer.generation, *row)))
        return cls(Order(Kind.DATA, position, tuple(parts)), tuple(senders))


def step_order(first: Position, parts: Parts, sizes: GraphSizes, settled: int) -> Order:
    """Returns the order for an announced step.

    The hosts run it if an attention instance uses another expert placement than ``settled``: a
    graph computes only the banks at home (ffn_worker/experts/banks.py).
    """
    bucket = sizes.bucket_of(parts.mix.shapes) if parts.mix.moves == {settled} else 0
    return Order(Kind.STEP, first, parts, bucket, settled)
