"""Orders between the processes of the FFN pool: which rows the next expert call contains. Pure.

An order is one message in a ring of small slots in host memory. From it the host of a follower
knows what to run before it runs or replays it.
"""

import functools
import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from afd.schedule import Position
from afd.wire.layout import Kind

_BUCKET = struct.Struct("<Q")
_PART = struct.Struct("<6Iq")
_HELLO_BYTES = 256
"""Enough for the address of a rendezvous."""


class Part(NamedTuple):
    """The rows of one attention rank in a call or step.

    attention, generation: number and generation of the rank. rows: in this call, or in the whole
    step on streams. depth: micro-batches of its step. moves: of a step on streams, the last expert
    move in the placement that it uses. receivers: the FFN instances that get its rows, as
    :func:`afd.wire.message.message` has them. step: its own number of the step.
    """

    attention: int
    generation: int
    rows: int
    depth: int
    moves: int
    receivers: int
    step: int


PARTS = np.dtype(
    [
        ("attention", "<u4"), ("generation", "<u4"), ("rows", "<u4"), ("depth", "<u4"),
        ("moves", "<u4"), ("receivers", "<u4"), ("step", "<i8"),
    ]
)  # fmt: skip
"""A part as it is in an order's payload."""
_BYTES = np.dtype((np.void, PARTS.itemsize))
_ALL_BUT_STEP = np.dtype((np.void, PARTS.itemsize - 8))


def gets(receivers: int, instance: int) -> bool:
    """Whether an FFN instance is among the receivers of a request or step."""
    return not receivers or bool(receivers >> instance & 1)


class Mix:
    """Who takes part in an announced step, with what: all of its parts but the steps' numbers.

    Most steps have the mix of the step before, and share its object.
    """

    def __init__(self, table: npt.NDArray[np.void]) -> None:
        """table: of :data:`PARTS`."""
        self._table = table

    @functools.cached_property
    def receivers(self) -> int:
        """The FFN instances that get rows; 0: all do."""
        return int(np.bitwise_or.reduce(self._table["receivers"]))

    @functools.cached_property
    def depth(self) -> int:
        return int(self._table["depth"].max())

    @functools.cached_property
    def moves(self) -> frozenset[int]:
        """The last expert moves in the placements that are used."""
        return frozenset(self._table["moves"].tolist())

    @functools.cached_property
    def shapes(self) -> frozenset[tuple[int, int]]:
        """The different (rows, depth)."""
        return frozenset(map(shape_of, word_at(self._table, "rows").tolist()))

    @functools.cached_property
    def words(self) -> bytes:
        """All that it consists of."""
        return self._table.getfield(_ALL_BUT_STEP).tobytes()


def word_at(table: npt.NDArray[np.void], field: str) -> npt.NDArray[np.uint64]:
    """Returns a view of the 8 bytes of each row that begin with this field: numpy takes as long for
    each field of a row as for all of them."""
    fields = table.dtype.fields
    assert fields is not None
    words: npt.NDArray[np.uint64] = table.getfield("<u8", fields[field][1])
    return words


def shape_of(word: int) -> tuple[int, int]:
    """Returns the (rows, depth) of a word at ``rows``."""
    return word & 0xFFFF_FFFF, word >> 32


class Parts(Sequence[Part]):
    """Parts in one array. With dozens of members, making their tuples takes longer than what the
    leader decides."""

    def __init__(self, table: npt.NDArray[np.void], last: Mix | None = None) -> None:
        """table: of :data:`PARTS`. last: the mix of the step before, to share it if it is the
        same."""
        self.table = table
        mix = Mix(table)
        self.mix = last if last is not None and last.words == mix.words else mix

    @classmethod
    def where(
        cls,
        table: npt.NDArray[np.void],
        taken: npt.NDArray[np.bool_],
        last: Mix | None = None,
    ) -> "Parts":
        """The rows of the table that are taken. last: see ``__init__``."""
        # As plain bytes, because numpy copies a row of fields one by one.
        return cls(table.view(_BYTES)[taken].view(PARTS), last)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "Parts":
        return parts if isinstance(parts, cls) else cls(np.array(list(parts), PARTS))

    def to(self, instance: int) -> "Parts":
        """Returns the parts whose rows this FFN instance gets."""
        receivers = self.table["receivers"]
        return Parts.where(self.table, (receivers == 0) | (receivers >> instance & 1 == 1))

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, at: int) -> Part: ...
    @overload
    def __getitem__(self, at: slice) -> "Parts": ...
    def __getitem__(self, at: int | slice) -> "Part | Parts":
        if isinstance(at, slice):
            return Parts(self.table[at])
        return Part(*self.table[at].item())

    def __iter__(self) -> Iterator[Part]:
        return map(Part._make, self.table.tolist())


@dataclass(frozen=True)
class Order:
    """One expert call (kind DATA) over the rows of all parts, concatenated; or a whole announced
    step (kind STEP), with ``position`` the first one of the step.

    bucket: of the graph that runs the step (:mod:`afd.graph_sizes`); 0: the hosts run it.
    settled: of an announced step, the last expert move that is complete for the leader.
    """

    kind: Kind
    position: Position
    parts: Sequence[Part]
    bucket: int = 0
    settled: int = 0

    @property
    def receivers(self) -> int:
        """The FFN instances that get rows of this call or step; 0: all do."""
        if isinstance(self.parts, Parts):
            return self.parts.mix.receivers
        if not self.parts[0].receivers:
            return 0
        return functools.reduce(operator.or_, [part.receivers for part in self.parts])

    @functools.cached_property
    def depth(self) -> int:
        if isinstance(self.parts, Parts):
            return self.parts.mix.depth
        return max([part.depth for part in self.parts])

    def payload(self) -> bytes:
        if isinstance(self.parts, Parts):
            return _BUCKET.pack(self.bucket) + self.parts.table.tobytes()
        parts = [_PART.pack(*part) for part in self.parts]
        return b"".join([_BUCKET.pack(self.bucket), *parts])


def read_order(kind: int, layer: int, micro_batch: int, settled: int, payload: bytes) -> Order:
    """Decode the order of a message with this header and payload."""
    (bucket,) = _BUCKET.unpack_from(payload)
    parts: Sequence[Part]
    if kind == Kind.STEP:
        parts = Parts(np.frombuffer(payload, PARTS, offset=_BUCKET.size))
    else:
        parts = tuple(Part(*fields) for fields in _PART.iter_unpack(payload[_BUCKET.size :]))
    return Order(Kind(kind), Position(layer, micro_batch), parts, bucket, settled)


def order_slot_bytes(attention_ranks: int) -> int:
    """Return the bytes of a slot that holds an order or a hello."""
    return max(_HELLO_BYTES, _BUCKET.size + _PART.size * attention_ranks)


def order_slots(attention_ranks: int, max_depth: int) -> int:
    """Return the slots of the ring: more than the orders that can be in flight to one follower.

    An order names at least one message of an attention instance, and the instance sends no further
    message for this micro-batch until the follower has answered. The remaining slots are for
    instances that restart.
    """
    return 4 * attention_ranks * (max_depth + 1) + 4
