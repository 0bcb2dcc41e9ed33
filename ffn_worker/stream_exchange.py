"""Stream form of the exchange: GPU streams wait for requests and send answers.

Nothing here waits on the host, so a graph can hold a whole step. Doorbells number the positions of
the step, so every replay waits for and rings the same ones (afd/schedule.py: stream_sequence).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from afd.schedule import Position, resets_doorbells, split_rows, stream_sequence, walk
from afd.wire.layout import Kind
from afd.wire.message import message
from afd.wire.slot_view_torch import RoutedRows
from afd.wire.streams_torch import Streams
from afd_comm import Guard, make_flag
from ffn_worker.pool.calls import Call
from ffn_worker.pool.peers import Peer
from ffn_worker.slots import EncodedAnswers, RankSlots

OWN_STREAM_DEPTH = 3
"""From this depth on, each micro-batch has a stream of its own. At depth 2, two micro-batches that
share the GPU finish together and leave it idle while both are in attention: a step took 7.2 ms with
two streams and 6.8 ms with one. At depth 3, separate streams gained 6 % (docs/results/gpu.md)."""


@dataclass(frozen=True)
class StepPeer:
    """An attention instance in a step on streams.

    session: the one whose doorbells it rings. rows: of the whole step. peer: None once it is gone;
    the guard then releases its waits at once, and nothing is sent to it.
    """

    attention: int
    session: int
    rows: int
    depth: int
    peer: Peer | None


def step_peers(call: Call) -> list[StepPeer]:
    """The attention instances of an announced step, in the order of their rows."""
    return [
        StepPeer(
            part.attention,
            0 if sender is None else sender.peer.session,
            part.rows,
            part.depth,
            None if sender is None else sender.peer,
        )
        for part, sender in zip(call.order.parts, call.senders, strict=True)
    ]


def step_depth(peers: Sequence[StepPeer]) -> int:
    """Micro-batches of the step."""
    return max(peer.depth for peer in peers)


def taking_part(peers: Sequence[StepPeer], micro_batch: int) -> tuple[list[StepPeer], list[int]]:
    """The attention instances that send rows in this micro-batch, and how many rows each sends."""
    present = [peer for peer in peers if micro_batch < peer.depth]
    return present, [split_rows(peer.rows, peer.depth)[micro_batch] for peer in present]


@dataclass(frozen=True)
class StreamCall:
    """One expert call of a step on streams. Lists: by attention instance that takes part."""

    position: Position
    depth: int
    peers: list[Peer | None]
    rows: list[int]
    slots: list[int]
    flags: list[int]


@dataclass
class Waits:
    """Doorbells that a step's streams wait for, in order, and whose they are: what the guard rings
    in place of a peer that is late or gone."""

    slots: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    peers: list[Peer | None] = field(default_factory=list)


class StreamExchange:
    """Enqueues one step at a time; see :class:`ffn_worker.pipeline.Exchange`."""

    def __init__(
        self, slots: RankSlots, streams: Streams, layers: Sequence[int], *, in_order: bool
    ) -> None:
        """layers: numbers of the MoE layers. in_order: all micro-batches share one stream."""
        self.slots = slots
        self.streams = streams
        self._layers = layers
        self._in_order = in_order
        self._reset = resets_doorbells(layers)
        self._waits = Waits()
        self._in_flight: dict[int, EncodedAnswers] = {}  # by micro-batch

    def begin_step(self) -> Waits:
        """Returns the wait list of the step, filled in as the step is enqueued."""
        self._waits = Waits()
        self._in_flight = {}
        self.streams.begin_step()
        return self._waits

    def calls(self, peers: Sequence[StepPeer]) -> Iterator[StreamCall]:
        """The expert calls of a step in the order of :func:`afd.schedule.walk`."""
        positions_of, depth = {peer.attention: 0 for peer in peers}, step_depth(peers)
        for position in walk(self._layers, depth):
            present, rows = taking_part(peers, position.micro_batch)
            flags = []
            for peer in present:
                positions_of[peer.attention] += 1
                sequence = stream_sequence(positions_of[peer.attention])
                flags.append(make_flag(peer.session, sequence))
            slots = self.request_slots(present, position.micro_batch)
            yield StreamCall(position, depth, [p.peer for p in present], rows, slots, flags)

    def request_slots(self, present: Sequence[StepPeer], micro_batch: int) -> list[int]:
        """The slots that these attention instances write this micro-batch into."""
        return [self.slots.request_slot(peer.attention, micro_batch) for peer in present]

    def running(self, call: StreamCall) -> AbstractContextManager[object]:
        if call.depth < OWN_STREAM_DEPTH or self._in_order:
            return nullcontext()
        return self.streams.apart(call.position.micro_batch)

    def wait(self, call: StreamCall) -> None:
        self.slots.region.enqueue_wait(
            self.streams.compute, call.slots, call.flags, reset=self._reset
        )
        self._waits.slots += call.slots
        self._waits.flags += call.flags
        self._waits.peers += call.peers
        # The peers have taken the previous answers, so their memory is free from here on.
        self._in_flight.pop(call.position.micro_batch, None)

    def read(self, call: StreamCall) -> RoutedRows:
        return self.slots.read(call.slots, call.rows)

    def encode(self, call: StreamCall, out: torch.Tensor) -> EncodedAnswers:
        answers = self._in_flight[call.position.micro_batch] = self.slots.encode(out)
        return answers

    def answer(
        self, call: StreamCall, counts: Sequence[int], answers: EncodedAnswers | None
    ) -> None:
        assert answers is not None, "an announced step has rows in every micro-batch"
        self.streams.fork()
        offset, layer, micro_batch = 0, call.position.layer, call.position.micro_batch
        slot = self.slots.answer_slot(micro_batch)
        for peer, rows, flag in zip(call.peers, counts, call.flags, strict=True):
            if peer is not None:
                answer = message(
                    slot,
                    answers.parts(offset, rows),
                    rows,
                    layer=layer,
                    micro_batch=micro_batch,
                    depth=call.depth,
                    kind=Kind.DATA,
                    tag=self.slots.answer_layout.tag,
                )
                peer.link.enqueue(self.streams.copy, answer, flag)
            offset += rows

    def end_step(self) -> None:
        self.streams.join()
        self._in_flight = {}

    def guard(self, waits: Waits) -> Guard:
        """Watches the step that was enqueued last, or replayed, until it ends."""
        return self.slots.region.guard(self.streams.compute, waits.slots, waits.flags)
