"""An announced step in host form: the plain reference of the stream form.

The attention side cannot tell the forms apart, because the flags are the same. The host runs an
announced step while there is no graph for it: an attention instance has just joined, or the step
is larger than every graph.
"""

import time
from collections.abc import Iterator, Sequence

from afd.schedule import resets_doorbells, split_rows, stream_sequence, walk
from afd.wire.layout import Kind
from afd.wire.message import message
from afd_comm import Status, make_flag
from ffn_worker.host_exchange import HostExchange
from ffn_worker.pipeline import Observer, Pipeline
from ffn_worker.pool.calls import Call, Sender
from ffn_worker.pool.order_format import Order
from ffn_worker.pool.peers import Peer
from ffn_worker.slots import EncodedAnswers, RankSlots


class AnnouncedExchange(HostExchange):
    """Posts answers with the flags of a step on streams; the rest as for the host's own steps."""

    flags: Sequence[int] = ()
    """Of the running call, by part."""

    def answer(self, call: Call, counts: Sequence[int], answers: EncodedAnswers | None) -> None:
        assert answers is not None, "an announced step has rows in every micro-batch"
        first, (layer, micro_batch) = 0, (call.position.layer, call.position.micro_batch)
        for part, sender, flag, rows in zip(
            call.order.parts, call.senders, self.flags, counts, strict=True
        ):
            if sender is not None:
                answer = message(
                    self._slots.answer_slot(micro_batch),
                    answers.parts(first, rows),
                    rows,
                    layer=layer,
                    micro_batch=micro_batch,
                    depth=part.depth,
                    kind=Kind.DATA,
                    tag=self._slots.answer_layout.tag,
                    step=part.step,
                )
                self._deliver(sender.peer, answer, flag)
            first += rows


class AnnouncedHost:
    """Runs announced steps, call by call."""

    def __init__(
        self,
        pipeline: Pipeline,
        slots: RankSlots,
        exchange: AnnouncedExchange,
        observer: Observer[Call],
        layers: Sequence[int],
        late_us: int,
    ) -> None:
        """late_us: how long a request may take after the answer before it, microseconds."""
        self._pipeline = pipeline
        self._slots = slots
        self._exchange = exchange
        self._observer = observer
        self._layers = layers
        self._late_s = late_us / 1e6
        self._reset = resets_doorbells(layers)

    def run(self, step: Call) -> list[tuple[Peer, Status]]:
        """Runs one announced step; returns the peers that did not keep up, and how.

        Raises:
            PeerLost, DeadlineExceeded: a rank of this instance did not keep up.
        """
        failed: list[tuple[Peer, Status]] = []
        self._pipeline.run(self._calls(step, failed), self._exchange, self._observer)
        return failed

    def _calls(self, step: Call, failed: list[tuple[Peer, Status]]) -> Iterator[Call]:
        """Yields the expert calls of a step, each once its requests are here."""
        region, lost = self._slots.region, set[str]()
        for position in walk(self._layers, step.order.depth):
            mb = position.micro_batch
            present = [
                (part, sender)
                for part, sender in zip(step.order.parts, step.senders, strict=True)
                if mb < part.depth
            ]
            nth = self._layers.index(position.layer)
            flags = [
                # A lost sender's flag is not used.
                make_flag(
                    0 if sender is None else sender.peer.session,
                    stream_sequence(nth * part.depth + mb + 1),
                )
                for part, sender in present
            ]
            awaited = [
                i for i, (_, s) in enumerate(present) if s is not None and s.peer.id not in lost
            ]
            slots = [self._slots.request_slot(present[i][0].attention, mb) for i in awaited]
            statuses = self._await(slots, [flags[i] for i in awaited])
            if self._reset:
                region.reset(slots)
            senders: list[Sender | None] = [None] * len(present)
            for i, status in zip(awaited, statuses, strict=True):
                sender = present[i][1]
                assert sender is not None
                if status == Status.OK:
                    senders[i] = sender
                else:
                    lost.add(sender.peer.id)
                    failed.append((sender.peer, status))
            parts = tuple(
                part._replace(rows=split_rows(part.rows, part.depth)[mb]) for part, _ in present
            )
            self._exchange.flags = flags
            yield Call(Order(Kind.DATA, position, parts), tuple(senders))

    def _await(self, slots: list[int], flags: list[int]) -> list[Status]:
        deadline = time.monotonic() + self._late_s
        while True:
            left_us = max(0, int((deadline - time.monotonic()) * 1e6))
            statuses = self._slots.region.wait_all(slots, flags, left_us)
            # The wait also ends when the membership changes.
            if Status.DEADLINE not in statuses or time.monotonic() >= deadline:
                return statuses
