"""Steps of an FFN instance that run on GPU streams alone: one graph per shape, replayed.

The attention side announces such a step; then every wait, expert call and answer of it is on a
stream, and the host only watches that it ends (afd_comm's guard).
"""

import logging
import time
from collections.abc import Callable
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
from ffn_worker.inbox import Inbox
from ffn_worker.model import FfnModel
from ffn_worker.peers import Arrival, Peer, PeerTable

logger = logging.getLogger("afd.ffn")

Shape = tuple[tuple[int, int, int, int], ...]
"""Per peer of a step: its index, session, rows and depth."""


@dataclass
class _Recorded:
    """A step as the streams know it. slots, flags: its waits in order, and whose they are."""

    slots: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
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
        table: PeerTable,
        model: FfnModel,
        streams: Streams,
        metrics: RoleMetrics,
    ) -> None:
        self._resolved = resolved
        self._region = region
        self._inbox = inbox
        self._table = table
        self._model = model
        self._streams = streams
        self._metrics = metrics
        self._stage_every = resolved.deployment.metrics.stage_every
        self._count = 0
        self._layers = resolved.model.moe_layers
        self._captures = model.capturable and model.device.type == "cuda"
        self._reset = resets_doorbells(self._layers)
        self._warm: set[int] = set()
        self._graphs: dict[Shape, _Recorded] = {}

    def run(self, arrivals: list[Arrival], timeout_us: int) -> list[tuple[Peer, Status]]:
        """One announced step of these peers; answers who did not keep up, and how.

        The peers' rows are those of their announcements. Late and dead ones are released after
        ``timeout_us`` and at once, and what they got in this step is garbage.
        """
        step = self._launch(arrivals)
        guard = self._region.guard(self._streams.compute, step.slots, step.flags)
        statuses = guard.wait(timeout_us)
        failed: dict[str, tuple[Peer, Status]] = {}
        for peer, status in zip(step.peers, statuses, strict=True):
            if status != Status.OK:
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

    def _launch(self, arrivals: list[Arrival]) -> _Recorded:
        if not self._captures:
            self._warm_up(arrivals)
            began_ns = time.monotonic_ns()
            step = self._record(arrivals)
            step.began_ns = began_ns
            return step
        shape = tuple((a.peer.index, a.peer.session, a.rows, a.depth) for a in arrivals)
        step = self._graphs.get(shape)
        if step is None:
            step = self._graphs[shape] = self._capture(arrivals)
            logger.info("captured a step of %s", [(a.peer.id, a.rows, a.depth) for a in arrivals])
        assert step.replay is not None
        step.began_ns = time.monotonic_ns()
        step.replay()
        return step

    def _warm_up(self, arrivals: list[Arrival]) -> None:
        """Compile and load the kernels of these shapes: not inside of a capture, nor behind a wait,
        where the driver would wait for an idle device (comm/README.md)."""
        sizes = {sum(rows for _, rows in self._at(arrivals, mb)) for mb in range(_depth(arrivals))}
        for rows in sizes - self._warm:
            out = self._model.warm_up(rows, self._resolved.a2f.tag)
            Answers.of(out, self._resolved.f2a)
        self._warm |= sizes

    def _capture(self, arrivals: list[Arrival]) -> _Recorded:
        self._warm_up(arrivals)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step = self._record(arrivals)
        step.replay = graph.replay
        return step

    def _at(self, arrivals: list[Arrival], micro_batch: int) -> list[tuple[Peer, int]]:
        """Who sends rows in this micro-batch, and how many."""
        return [
            (a.peer, split_rows(a.rows, a.depth)[micro_batch])
            for a in arrivals
            if micro_batch < a.depth
        ]

    def _record(self, arrivals: list[Arrival]) -> _Recorded:
        """All expert calls of the step, given to the streams in the order of the walk."""
        step = _Recorded(marks=new_marks(self._streams, 0, self._stage_every))
        step.marks.begin()
        position_of: dict[str, int] = {a.peer.id: 0 for a in arrivals}
        held: dict[int, Answers] = {}
        for position in walk(self._layers, _depth(arrivals)):
            taking_part = self._at(arrivals, position.micro_batch)
            for peer, _ in taking_part:
                position_of[peer.id] += 1
            flags = [
                make_flag(peer.session, stream_sequence(position_of[peer.id]))
                for peer, _ in taking_part
            ]
            slots = [self._table.slot(peer, position.micro_batch) for peer, _ in taking_part]
            self._region.enqueue_wait(self._streams.compute, slots, flags, reset=self._reset)
            step.marks.working()
            step.slots += slots
            step.flags += flags
            step.peers += [peer for peer, _ in taking_part]
            # Only now is the answer before this one surely copied, and its memory free.
            held.pop(position.micro_batch, None)
            batch = self._inbox.read(slots, [rows for _, rows in taking_part])
            out = self._model.forward(position.layer, batch.x, batch.ids, batch.weights)
            answers = held[position.micro_batch] = Answers.of(out, self._resolved.f2a)
            step.marks.done(position.layer, position.micro_batch, len(batch.x))
            self._streams.fork()
            self._answer(position, _depth(arrivals), taking_part, flags, answers)
            step.marks.copied()
        step.marks.end()
        self._streams.join()
        return step

    def _answer(
        self,
        position: Position,
        depth: int,
        taking_part: list[tuple[Peer, int]],
        flags: list[int],
        answers: Answers,
    ) -> None:
        offset = 0
        slot = self._resolved.slots.to_attention(self._model.index, position.micro_batch)
        for (peer, rows), flag in zip(taking_part, flags, strict=True):
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


def _depth(arrivals: list[Arrival]) -> int:
    return max(a.depth for a in arrivals)
