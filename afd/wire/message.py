"""What a message header says between attention and FFN instances. Pure.

Every header of the transport (afd_comm) has room for a few bytes of its application. This module is
the only place that knows their layout. Both sides of a deployment must run the same layout, so a
change of it needs a new protocol version in the transport's handshakes.
"""

import struct
from typing import NamedTuple

import numpy as np

from afd_comm import Header, Message

_WORDS = struct.Struct("<hhbbbxIIq")
_pack, _unpack = _WORDS.pack, _WORDS.unpack
_new = tuple.__new__

HEADERS = np.dtype(
    [
        ("seen", "<u8"), ("layer", "<i2"), ("micro_batch", "<i2"), ("depth", "<i1"),
        ("kind", "<i1"), ("tag", "<i1"), ("unused", "<i1"), ("moves", "<u4"),
        ("receivers", "<u4"), ("step", "<i8"), ("rows", "<u8"), ("nbytes", "<u8"),
    ]
)  # fmt: skip
"""A row of ``afd_comm.Region.read_headers``, for messages that :func:`message` made."""

TraceEvent = tuple[int, int, int, int, int, int, int, int]
"""(posted, sent, arrived, consumed, layer, micro_batch, rows, nbytes); times in ns."""


def message(
    slot: int,
    parts: list[tuple[int, int, int]],
    rows: int,
    *,
    layer: int,
    micro_batch: int,
    depth: int,
    kind: int,
    tag: int = 0,
    step: int = 0,
    moves: int = 0,
    receivers: int = 0,
    whole: int = 0,
) -> Message:
    """Return a message of ``rows`` rows for ``slot``.

    Args:
        parts: (offset in the slot, address, bytes) of each contiguous piece of the payload, which
            must stay valid until the message is sent.
        layer, micro_batch: position; -1 on the control slot.
        depth: micro-batches of the step.
        kind: :class:`afd.wire.layout.Kind`.
        tag: :class:`afd.wire.layout.Tag` of the payload.
        step: the attention instance's own number of the step; 0 in a replayed step.
        moves: of an announced step, the last expert move in the placement that its sender uses; of
            an order, the last move that is complete (afd/control/moves.py).
        receivers: of a request or an announced step, bit j is set if FFN instance j gets it; 0: all
            get it.
        whole: so many of the last parts travel whole where the other parts are cut to a number of
            rows (``afd_comm.Link.enqueue``).
    """
    return Message(
        slot,
        parts,
        _pack(layer, micro_batch, depth, kind, tag, moves, receivers, step),
        rows,
        whole,
    )


def follows_count(backend: str) -> bool:
    """Whether a message of a stream by this backend of the transport has only the rows that the
    stream has counted, and says so in its header. Backend ipc copies all rows, because nothing but
    a kernel could read the count."""
    return backend in ("tcp", "verbs")


class Received(NamedTuple):
    """Header of a received message; the fields are those of :func:`message`."""

    layer: int
    micro_batch: int
    depth: int
    kind: int
    tag: int
    moves: int
    receivers: int
    step: int
    rows: int
    nbytes: int  # size of the payload
    answer_to: Header  # the same header as the transport returned it, for ``Link.post``


def received(header: Header) -> Received:
    """Read the header of a message that :func:`message` made."""
    # Skips the constructor of NamedTuple, which takes as long as the rest.
    return _new(Received, (*_unpack(header.user), header.count, header.nbytes, header))


def trace_event(event: tuple[int, int, int, int, bytes, int, int]) -> TraceEvent:
    """Read an entry of ``afd_comm.PeerTrace.events``."""
    posted, sent, arrived, consumed, user, rows, nbytes = event
    layer, micro_batch = _unpack(user)[:2]
    return posted, sent, arrived, consumed, layer, micro_batch, rows, nbytes
