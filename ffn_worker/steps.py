"""Steps of an FFN instance that run on GPU streams alone: one graph per shape, replayed.

The attention side announces such a step and the leader orders it; then every wait, expert call,
sum over ranks and answer of it is on a stream, and the host only watches that it ends (afd_comm's
guard).
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from afd.metrics import RoleMetrics
from afd.resolve import Resolved
from afd.schedule import Position, resets_doorbells, split_rows, stream_sequence, walk
from afd.step_trace import Marks, NoMarks, new_marks
from afd.wire.layout import Kind
from afd.wire.streams_torch import Streams
from afd_comm import Region, Status, make_flag
from ffn_worker.answers import Answers
from ffn_worker.calls import Call
from ffn_worker.inbox import Inbox
from ffn_worker.model import FfnModel
from ffn_worker.peers import Peer
from ffn_worker.shares import Shares

logger = logging.getLogger("afd.ffn")

APART_FROM = 3
"""Depth from which on each micro-batch has a stream of its own. Two that share the GPU end at the
same time and leave it idle while both are in attention: at depth 2 a step took 7.2 ms so and 6.8
one after the other, where depth 3 gained 6 % (docs/results/gpu.md)."""

Shape = tuple[tuple[int, int, int, int], ...]
"""Per attention instance of a step: its index, session, rows and depth."""


@dataclass(frozen=True)
class Member:
    """An attention instance in a step, and the session whose doorbells it rings.

    peer: None once it is gone. Its waits are released at once then, and nothing is sent to it.
    """

    attention: int
    session: int
    rows: int
    depth: int
    peer: Peer | None


def members_of(call: Call) -> list[Member]:
    return [
        Member(
            part.attention,
            0 if sender is None else sender.peer.session,
            part.rows,
            part.depth,
            None if sender is None else sender.peer,
        )
        for part, sender in zip(call.order.parts, call.senders, strict=True)
    ]


@dataclass
class _Recorded:
    """A step as the streams know it. slots, flags: its waits in order, and whose they are."""

    slots: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    peers: list[Peer | None] = field(default_factory=list)
    replay: Callable[[], None] | None = None
    marks: Marks = field(default_factory=NoMarks)
    began_ns: int = 0


class StreamSteps:
    """Captures each shape of step when it first comes, and replays it from then on.

    On device cpu, and with a backend that cannot be captured, every step is enqueued anew.
    """

    def __init__(
        self,
        resolved: Resolved,
        region: Region,
        inbox: Inbox,
        model: FfnModel,
        shares: Shares,
        streams: Streams,
        number: int,
        metrics: RoleMetrics,
    ) -> None:
        """number: of this rank in the pool."""
        self._resolved = resolved
        self._region = region
        self._inbox = inbox
        self._model = model
        self._shares = shares
        self._streams = streams
        self._number = number
        self._metrics = metrics
        self._stage_every = resolved.deployment.metrics.stage_every
        self._count = 0
        self._layers = resolved.model.moe_layers
        capturable = model.capturable and shares.capturable
        self._captures = capturable and model.device.type == "cuda"
        self._reset = resets_doorbells(self._layers)
        self._warm: set[tuple[int, ...]] = set()
        self._graphs: dict[Shape, _Recorded] = {}

    def run(self, call: Call, timeout_us: int) -> list[tuple[Peer, Status]]:
        """One announced step of these peers; answers who did not keep up, and how.

        Late and dead ones are released after ``timeout_us`` and at once, and what they got in this
        step is garbage.

        Raises:
            PeerLost, DeadlineExceeded: a rank of this instance did not keep up.
        """
        step = self._launch(members_of(call))
        guard = self._region.guard(self._streams.compute, step.slots, step.flags)
        statuses = guard.wait(timeout_us)
        self._shares.check()
        failed: dict[str, tuple[Peer, Status]] = {}
        for peer, status in zip(step.peers, statuses, strict=True):
            if status != Status.OK and peer is not None:
                failed[peer.id] = (peer, status)
        if not failed:
            self._note_stages(step)
        return list(failed.values())

    def _note_stages(self, step: _Recorded) -> None:
        self._count += 1
        if self._stage_every and self._count % self._stage_every == 0:
            trace = step.marks.read(step.began_ns, replayed=True)
            if trace is not None:
                self._metrics.note_replay(trace)

    def forget(self, sessions: set[int]) -> None:
        """Drop the graphs that belong to any session but these."""
        ended = [shape for shape in self._graphs if not {s for _, s, _, _ in shape} <= sessions]
        for shape in ended:
            del self._graphs[shape]

    def _launch(self, members: Sequence[Member]) -> _Recorded:
        if not self._captures:
            self._warm_up(members)
            began_ns = time.monotonic_ns()
            step = self._record(members)
            step.began_ns = began_ns
            return step
        shape = tuple((m.attention, m.session, m.rows, m.depth) for m in members)
        step = self._graphs.get(shape)
        if step is None:
            step = self._graphs[shape] = self._capture(members)
            who = [(f"attention-{m.attention}", m.rows, m.depth) for m in members]
            logger.info("captured a step of %s", who)
        assert step.replay is not None
        step.began_ns = time.monotonic_ns()
        step.replay()
        return step

    def _warm_up(self, members: Sequence[Member]) -> None:
        """Compile and load the kernels of these shapes: not inside of a capture, nor behind a wait,
        where the driver would wait for an idle device (comm/README.md)."""
        for micro_batch in range(_depth(members)):
            taking_part = self._at(members, micro_batch)
            rows = tuple(n for _, n in taking_part)
            if rows not in self._warm:
                self._inbox.read(self._slots(taking_part, micro_batch), rows)
                out = self._model.warm_up(sum(rows), self._resolved.a2f.tag)
                sums, _ = self._shares.of(out, rows)
                Answers.of(sums, self._resolved.f2a)
                self._warm.add(rows)

    def _capture(self, members: Sequence[Member]) -> _Recorded:
        self._warm_up(members)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a read of the metrics, on a thread of its own, may copy the experts' load
        # from the device meanwhile.
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step = self._record(members)
        step.replay = graph.replay
        return step

    def _at(self, members: Sequence[Member], micro_batch: int) -> list[tuple[Member, int]]:
        """Who sends rows in this micro-batch, and how many."""
        return [
            (m, split_rows(m.rows, m.depth)[micro_batch]) for m in members if micro_batch < m.depth
        ]

    def _slots(self, taking_part: Sequence[tuple[Member, int]], micro_batch: int) -> list[int]:
        return [self._resolved.slots.to_ffn(m.attention, micro_batch) for m, _ in taking_part]

    def _record(self, members: Sequence[Member]) -> _Recorded:
        """All expert calls of the step, given to the streams in the order of the walk."""
        step = _Recorded(marks=new_marks(self._streams, 0, self._stage_every))
        step.marks.begin()
        self._streams.begin_step()
        position_of, depth = {m.attention: 0 for m in members}, _depth(members)
        held: dict[int, Answers] = {}
        for position in walk(self._layers, depth):
            taking_part, flags = self._at(members, position.micro_batch), []
            for member, _ in taking_part:
                position_of[member.attention] += 1
                sequence = stream_sequence(position_of[member.attention])
                flags.append(make_flag(member.session, sequence))
            with self._stream_of(position.micro_batch, depth):
                self._run_position(step, position, depth, taking_part, flags, held)
        self._streams.join()
        step.marks.end()
        return step

    def _stream_of(self, micro_batch: int, depth: int) -> AbstractContextManager[object]:
        if depth < APART_FROM or self._shares.in_order:
            return nullcontext()
        return self._streams.apart(micro_batch)

    def _run_position(
        self,
        step: _Recorded,
        position: Position,
        depth: int,
        taking_part: Sequence[tuple[Member, int]],
        flags: Sequence[int],
        held: dict[int, Answers],
    ) -> None:
        """Wait for the messages of a position, compute and answer it.

        held: by micro-batch, the memory of the answers that are under way.
        """
        peers, rows = [m.peer for m, _ in taking_part], [n for _, n in taking_part]
        slots = self._slots(taking_part, position.micro_batch)
        self._region.enqueue_wait(self._streams.compute, slots, flags, reset=self._reset)
        step.marks.working()
        step.slots += slots
        step.flags += flags
        step.peers += peers
        # Only now is the answer before this one surely copied, and its memory free.
        held.pop(position.micro_batch, None)
        batch = self._inbox.read(slots, rows)
        out = self._model.forward(position.layer, batch.x, batch.ids, batch.weights)
        out, counts = self._shares.of(out, rows)
        answers = held[position.micro_batch] = Answers.of(out, self._resolved.f2a)
        step.marks.done(position.layer, position.micro_batch, sum(rows))
        self._streams.fork()
        self._answer(position, depth, peers, counts, flags, answers)
        step.marks.copied()

    def _answer(
        self,
        position: Position,
        depth: int,
        peers: Sequence[Peer | None],
        counts: Sequence[int],
        flags: Sequence[int],
        answers: Answers,
    ) -> None:
        """Each peer's share of the rows; ``counts``: of each of them."""
        offset = 0
        slot = self._resolved.slots.to_attention(self._number, position.micro_batch)
        for peer, rows, flag in zip(peers, counts, flags, strict=True):
            if peer is not None:
                peer.link.enqueue(
                    self._streams.copy,
                    slot,
                    flag,
                    position.layer,
                    position.micro_batch,
                    rows,
                    depth,
                    Kind.DATA,
                    self._resolved.f2a.tag,
                    0,
                    answers.parts(offset, rows),
                )
            offset += rows


def _depth(members: Sequence[Member]) -> int:
    return max(member.depth for member in members)
