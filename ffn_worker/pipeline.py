"""The body of an FFN rank: one explicit loop over the expert calls of all attention instances."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from afd.schedule import Position
from afd.wire.slot_view_torch import RoutedRows
from ffn_worker.experts.model import FfnModel
from ffn_worker.rank_reduce import RankReduce
from ffn_worker.slots import EncodedAnswers


class ExpertCall(Protocol):
    """One position of a step, over the rows of all attention instances that take part in it."""

    @property
    def position(self) -> Position: ...

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each attention instance that takes part."""


AnyCall = TypeVar("AnyCall", bound=ExpertCall)
_Call = TypeVar("_Call", bound=ExpertCall, contravariant=True)


class Exchange(Protocol[_Call]):
    """Requests and answers of an expert call.

    In host form the host reads and posts the messages
    (:class:`ffn_worker.host_exchange.HostExchange`). In stream form GPU streams do
    (:class:`ffn_worker.stream_exchange.StreamExchange`): each method queues its work and returns.
    """

    def running(self, call: _Call) -> AbstractContextManager[object]:
        """Encloses all work of the call."""

    def wait(self, call: _Call) -> None:
        """Waits for the requests of the call. Host form: does nothing, because the source of the
        call has waited (ffn_worker/pool). Stream form: the stream waits."""

    def read(self, call: _Call) -> RoutedRows | None:
        """Returns the rows of all requests, concatenated; None if there is no row."""

    def encode(self, call: _Call, out: torch.Tensor) -> EncodedAnswers:
        """Returns the answers in the wire's format.

        out: serving dtype [rows, hidden], the rows that this rank returns.
        """

    def answer(self, call: _Call, counts: Sequence[int], answers: EncodedAnswers | None) -> None:
        """Sends each attention instance its ``counts[i]`` rows; ``answers`` None: no rows."""


class Observer(Protocol[_Call]):
    """Counts what runs and takes stage timestamps; see :mod:`ffn_worker.observers`."""

    def working(self, call: _Call) -> None:
        """The requests of the call are here; its work starts."""

    def done(self, call: _Call) -> None:
        """The answers of the call are computed and encoded."""

    def answered(self, call: _Call, counts: Sequence[int]) -> None:
        """The answers of the call are sent; ``counts``: rows per attention instance."""


@dataclass(frozen=True)
class Pipeline:
    """Computes expert calls: the experts of this rank, then the sum over the ranks."""

    model: FfnModel
    reduce: RankReduce

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold the expert calls."""
        return self.model.capturable and self.reduce.capturable

    def run(
        self, calls: Iterable[AnyCall], exchange: Exchange[AnyCall], observer: Observer[AnyCall]
    ) -> None:
        """Runs expert calls in the given order.

        While one micro-batch is here, another is on the wire and a third in attention. So this side
        waits for attention in one place only: in ``wait``, or in host form in the iteration over
        ``calls``. Besides, the ranks of an instance wait for each other in the sum, and in host
        form ``encode`` waits for the device.
        """
        for call in calls:
            with exchange.running(call):
                self._run_call(call, exchange, observer)

    def _run_call(
        self, call: AnyCall, exchange: Exchange[AnyCall], observer: Observer[AnyCall]
    ) -> None:
        """A function of its own, so that the memory of one call is free before the next begins."""
        exchange.wait(call)
        observer.working(call)
        batch = exchange.read(call)
        if batch is None:  # routed dispatch: no row has an expert in this instance, on any rank
            counts, answers = call.rows, None
        else:
            out = self.model.forward(call.position.layer, batch.x, batch.ids, batch.weights)
            out, counts = self.reduce.reduce_scatter(out, call.rows)
            answers = exchange.encode(call, out)
        observer.done(call)
        exchange.answer(call, counts, answers)
        observer.answered(call, counts)
