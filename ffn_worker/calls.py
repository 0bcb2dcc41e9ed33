"""One thing to run: an expert call or a step on streams, and whose rows are in it."""

from dataclasses import dataclass

from afd.schedule import Position
from afd.wire.layout import Kind
from afd.wire.orders import Order, Part
from afd_comm import Header
from ffn_worker.peers import Peer


@dataclass(frozen=True)
class Sender:
    """Who sent a part of a call, and the header of the message; None for a step on streams."""

    peer: Peer
    header: Header | None


@dataclass(frozen=True)
class Call:
    """An order, and the sender of each of its parts. None where the sender has died: its rows are
    counted, masked and not answered, because all ranks of an instance add up the same rows."""

    order: Order
    senders: tuple[Sender | None, ...]

    @classmethod
    def of(cls, position: Position, senders: list[Sender]) -> "Call":
        """An expert call over what these have sent."""
        parts = []
        for sender in senders:
            header, peer = sender.header, sender.peer
            assert header is not None
            parts.append(part_of(peer, header.rows, header.depth, header.step))
        return cls(Order(Kind.DATA, position, tuple(parts)), tuple(senders))


def part_of(peer: Peer, rows: int, depth: int, step: int) -> Part:
    return Part(peer.index, peer.generation, rows, depth, step)
