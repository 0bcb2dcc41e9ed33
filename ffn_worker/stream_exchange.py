"""Stream form of the exchange: a stream waits for requests and writes answers.

Nothing here waits on the host, so a graph can hold a whole step. The stream waits for one word per
position and writes one ticket behind its answers. A thread of the transport, the gate, waits for
the requests of those who take part and sends them the answers (afd_comm.StepGate). So a graph holds
no address of a peer and does not depend on who takes part: it has room for the same number of rows,
the bucket, from every attention instance, and masks those that were not sent.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from afd.config.resolve import Resolved
from afd.schedule import Position, row_shares, stream_sequence, walk
from afd.topology import FfnPlace
from afd.wire.layout import Kind
from afd.wire.message import follows_count, message
from afd.wire.slot_view_torch import RoutedRows
from afd.wire.streams_torch import Streams
from afd_comm import Status, StepGate, StepPlan, make_flag
from ffn_worker.pool.peers import Peer
from ffn_worker.row_table import RowTable
from ffn_worker.slots import EncodedAnswers, RankSlots

OWN_STREAM_DEPTH = 3
"""From this depth on, each micro-batch has a stream of its own. At depth 2, two micro-batches that
share the GPU finish together and leave it idle while both are in attention: a step took 7.2 ms with
two streams and 6.8 ms with one. At depth 3, separate streams gained 6 % (docs/results/gpu.md)."""


_ALL_ROWS = -(2**30)
"""In place of an answer's first row: the request says nothing about rows, so all are answered."""


@dataclass(frozen=True)
class StepShape:
    """All that the graph of a step depends on.

    bucket: rows of each attention instance in each micro-batch. depth: micro-batches.
    """

    bucket: int
    depth: int


@dataclass(frozen=True)
class StreamCall:
    """One expert call of a step on streams.

    number: of the position in the step, from 1. rows: the bucket, for each attention instance.
    """

    position: Position
    depth: int
    number: int
    rows: Sequence[int]


class StreamExchange:
    """Enqueues one step at a time; see :class:`ffn_worker.pipeline.Exchange`.

    Attributes:
        gate: of this rank's region. table: the rows of the step.
        send_memory: by micro-batch, where answers are sent from.
    """

    def __init__(
        self,
        resolved: Resolved,
        place: FfnPlace,
        slots: RankSlots,
        streams: Streams,
        device: torch.device,
        *,
        in_order: bool,
    ) -> None:
        """in_order: all micro-batches share one stream."""
        instances, depth = resolved.slots.attention_ranks, resolved.contract.max_depth
        self.slots = slots
        self.streams = streams
        buckets = enumerate(resolved.contract.graph_buckets, start=1)
        most_rows = max((d * sizes[-1] for d, sizes in buckets if sizes), default=0)
        self.table = RowTable(instances, depth, most_rows, device, rank=place.rank, tp=place.tp)
        self.gate = StepGate(slots.region, peers=instances, lanes=depth)
        self._place = place
        self._instances = instances
        # By attention instance: whether its requests say how many of their rows count.
        self._counted = np.zeros(instances, np.bool_)
        self._routed = resolved.dispatch == "routed"
        self._hidden = resolved.model.hidden
        self._layers = resolved.model.step_layers
        self._device = device
        self._in_order = in_order
        self.send_memory: list[EncodedAnswers] = []
        self._in_flight: dict[int, EncodedAnswers] = {}  # by micro-batch

    # Before a step.

    def allocate(self, largest: Sequence[int]) -> None:
        """Allocates the memory from which answers are sent; call it before the first step.

        largest: by micro-batch, the largest bucket.
        """
        for bucket in largest:
            rows = self._instances * self._share(bucket)
            zeros = torch.zeros((rows, self._hidden), device=self._device)
            self.send_memory.append(self.slots.encode(zeros))

    def greet(self, peer: Peer) -> None:
        """Takes a peer's session into use.

        Raises:
            CommError: memory cannot be registered for its link.
        """
        for memory in self.send_memory:
            for part in (memory.payload, memory.scales):
                if part is not None and part.nbytes:
                    device = self.slots.region.device
                    peer.link.register_memory(part.data_ptr(), part.nbytes, device)
        self._counted[peer.index] = follows_count(peer.link.backend)
        self.gate.set_peer(
            peer.index,
            peer.link,
            first_slot=self.slots.request_slot(peer.index, 0),
            first_flag=make_flag(peer.session, stream_sequence(1)),
        )

    def plan(self, shape: StepShape) -> StepPlan:
        """Returns what the step sends, for the gate."""
        positions = []
        for position in walk(self._layers, shape.depth):
            answer = message(
                self.slots.answer_slot(position.micro_batch),
                self.send_memory[position.micro_batch].parts(0, 1),  # of one row
                0,
                layer=position.layer,
                micro_batch=position.micro_batch,
                depth=shape.depth,
                kind=Kind.DATA,
                tag=self.slots.answer_layout.tag,
            )
            positions.append((position.micro_batch, answer))
        return StepPlan(positions, lanes=shape.depth, stride=self._share(shape.bucket))

    # The step.

    def begin_step(self, depth: int) -> None:
        self._in_flight = {}
        self.table.load()
        self.streams.begin_step(depth)

    def calls(self, shape: StepShape) -> Iterator[StreamCall]:
        """The expert calls of a step in the order of :func:`afd.schedule.walk`."""
        rows = [shape.bucket] * self._instances
        for number, position in enumerate(walk(self._layers, shape.depth), start=1):
            yield StreamCall(position, shape.depth, number, rows)

    def running(self, call: StreamCall) -> AbstractContextManager[object]:
        if call.depth < OWN_STREAM_DEPTH or self._in_order:
            return nullcontext()
        return self.streams.apart(call.position.micro_batch)

    def wait(self, call: StreamCall) -> None:
        lane = call.position.micro_batch
        self.gate.enqueue_wait(self.streams.compute, lane, call.number)
        # The last answers of this micro-batch were sent, so their memory is free from here on.
        self._in_flight.pop(lane, None)

    def read(self, call: StreamCall) -> RoutedRows:
        micro_batch = call.position.micro_batch
        return self.slots.read_bucket(micro_batch, call.rows[0], self.table.of(micro_batch))

    def encode(self, call: StreamCall, out: torch.Tensor) -> EncodedAnswers:
        answers = self._in_flight[call.position.micro_batch] = self.slots.encode(out)
        return answers

    def answer(
        self, call: StreamCall, counts: Sequence[int], answers: EncodedAnswers | None
    ) -> None:
        assert answers is not None, "an announced step has rows in every micro-batch"
        lane = call.position.micro_batch
        self.streams.fork()
        with self.streams.copying():
            answers.copy_to(self.send_memory[lane])
        self.gate.enqueue_ticket(self.streams.copy, lane, call.number)

    def end_step(self) -> None:
        self.streams.join()
        self._in_flight = {}

    def begin_answers(self, plan: StepPlan, late_us: int) -> None:
        """Starts the gate for the step in the table; call it before the stream gets the step."""
        table = self.table
        firsts = None
        if self._routed and self._counted.any():
            firsts = np.where(self._counted[:, None], table.firsts, _ALL_ROWS).astype(np.int32)
        self.gate.begin(plan, table.depths, table.answers, late_us, firsts)

    def wait_for_step(self) -> dict[int, Status]:
        """Waits until the step that was begun last has ended. Returns the status of each attention
        instance that did not keep up.

        Raises:
            CommError: the stream hangs.
        """
        return self.gate.wait(self.streams.compute)

    def _share(self, bucket: int) -> int:
        start, end = row_shares(bucket, self._place.tp)[self._place.rank]
        return end - start
