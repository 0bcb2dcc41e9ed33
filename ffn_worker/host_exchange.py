"""Host form of the exchange: requests are in receive slots already, and the host posts answers."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from afd.wire.layout import Kind
from afd.wire.message import message
from afd.wire.slot_view_torch import RoutedRows
from afd.wire.streams_torch import synchronize
from afd_comm import Header, Message, Status
from ffn_worker.call_watchdog import CallClock
from ffn_worker.experts.moves import ExpertMoves
from ffn_worker.pool.calls import Call, Sender
from ffn_worker.pool.peers import Peer
from ffn_worker.rank_reduce import RankReduce
from ffn_worker.slots import EncodedAnswers, RankSlots

logger = logging.getLogger("afd.ffn")


class HostExchange:
    """See :class:`ffn_worker.pipeline.Exchange`.

    Args:
        clock: shows the running call to the watchdog.
        moves: rejects rows whose experts are not held here.
    """

    def __init__(
        self, slots: RankSlots, reduce: RankReduce, clock: CallClock, moves: ExpertMoves
    ) -> None:
        self._slots = slots
        self._reduce = reduce
        self._clock = clock
        self._moves = moves

    def running(self, call: Call) -> AbstractContextManager[object]:
        return self._clock.running(call.position.layer, sum(call.rows))

    def wait(self, call: Call) -> None:
        """Does nothing: the source of the call has waited for its requests (ffn_worker/pool)."""

    def read(self, call: Call) -> RoutedRows | None:
        if not any(call.rows):
            return None
        layer, micro_batch = call.position.layer, call.position.micro_batch
        slots = [self._slots.request_slot(p.attention, micro_batch) for p in call.order.parts]
        lost = [s for s, sender in zip(slots, call.senders, strict=True) if sender is None]
        batch = self._slots.read(slots, call.rows, lost)
        self._moves.check_held(layer, batch.ids)
        return batch

    def encode(self, call: Call, out: torch.Tensor) -> EncodedAnswers:
        """Encodes the answers and waits until they are in memory: the host posts them from there.

        Raises:
            PeerLost, DeadlineExceeded: a rank of this instance did not take part in the sum.
        """
        answers = self._slots.encode(out)
        synchronize(out.device)
        self._reduce.check()
        return answers

    def answer(self, call: Call, counts: Sequence[int], answers: EncodedAnswers | None) -> None:
        first = 0
        for sender, rows in zip(call.senders, counts, strict=True):
            if sender is not None:
                parts = answers.parts(first, rows) if answers is not None else []
                self._post(sender, rows, parts)
            first += rows

    def _post(self, sender: Sender, rows: int, parts: list[tuple[int, int, int]]) -> None:
        peer, request = sender.peer, sender.request
        assert request is not None
        mb = request.micro_batch
        answer = message(
            self._slots.answer_slot(mb),
            parts,
            rows,
            layer=request.layer,
            micro_batch=mb,
            depth=request.depth,
            kind=Kind.DATA,
            tag=self._slots.answer_layout.tag,
            step=request.step,
        )
        doorbell = peer.doorbells.item(mb) - 1  # that of the request
        # answer_to returns the request's time stamps to its sender.
        self._deliver(peer, answer, doorbell, request.answer_to)

    def _deliver(
        self, peer: Peer, answer: Message, doorbell: int, answer_to: Header | None = None
    ) -> None:
        status = peer.link.post(answer, doorbell, answer_to)
        if status != Status.OK:
            logger.warning("answer to %s was not delivered: %s", peer.id, status.name)
