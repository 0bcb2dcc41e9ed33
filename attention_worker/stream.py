"""The remote half of a layer as operations of GPU streams: nothing here waits on the host.

Used while a step is captured: the graph then holds the copies to the FFN instances, the doorbells
and the waits for theirs, and a replay runs the whole step without the host
(:mod:`attention_worker.graphs`). Doorbells number the positions of the step, so every replay rings
the same ones (afd/schedule.py: stream_sequence).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from afd.resolve import Resolved
from afd.schedule import resets_doorbells, stream_sequence
from afd.step_trace import Marks, NoMarks
from afd.wire.codecs_torch import DTYPE_OF_TAG
from afd.wire.layout import TAG_OF_DTYPE, Kind
from afd.wire.slot_torch import SlotView, sum_of_ranks
from afd.wire.streams_torch import Streams, slot_bytes
from afd_comm import Region, Status, make_flag
from attention_worker.dispatch import ExpertSlots
from attention_worker.ffn_sessions import Ffn
from attention_worker.outgoing import Outgoing, encode


@dataclass
class Waits:
    """Doorbells that a step's stream waits for, in order: what a guard has to ring in the place of
    a peer that died. slots, flags: per wait, of every FFN rank in turn."""

    slots: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)


def failed_peers(statuses: Sequence[Status], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of FFN ranks (gone, late) of a step by the statuses of its waits.

    Args:
        count: number of FFN ranks; every answer was awaited from each of them in turn.
    """

    def which(wanted: Status) -> tuple[int, ...]:
        return tuple(sorted({i % count for i, status in enumerate(statuses) if status == wanted}))

    return which(Status.PEER_GONE), which(Status.DEADLINE)


class StreamExperts:
    """Records one step at a time; see :class:`attention_worker.pipeline.Experts`.

    The sessions are those of the recording: a graph is void once one of them ends.
    """

    def __init__(self, resolved: Resolved, index: int, region: Region, streams: Streams) -> None:
        self._resolved = resolved
        self._index = index
        self._region = region
        self._streams = streams
        self._dtype = DTYPE_OF_TAG[TAG_OF_DTYPE[resolved.model.dtype]]
        self._answers = [
            [self._answer(j, mb) for mb in range(resolved.contract.max_depth)]
            for j in range(resolved.slots.ffn_ranks)
        ]
        self._tp = resolved.contract.ffn_tp
        self._reset = resets_doorbells(resolved.model.moe_layers)
        self._pending: list[Outgoing | None] = [None] * resolved.contract.max_depth
        self._awaited: list[list[int]] = [[] for _ in range(resolved.contract.max_depth)]
        self._slots = ExpertSlots(resolved, index)
        self._peers: tuple[Ffn, ...] = ()
        self._waits = Waits()
        self._marks: Marks = NoMarks()
        self._depth = 1
        self._position = 0

    def record(self, peers: tuple[Ffn, ...], marks: Marks) -> Waits:
        """The step that the model runs next is between these sessions; answers what it will have
        waited for when it is through. marks: of its replays."""
        self._peers = peers
        self._marks = marks
        self._waits = Waits()
        return self._waits

    def begin_step(self, depth: int) -> None:
        self._depth = depth
        self._position = 0
        self._marks.begin()

    @contextmanager
    def sending(self, layer: int, micro_batch: int, rows: int) -> Iterator[None]:
        """Router and encoding go to the copying stream, behind all that was computed so far.

        What they read has to live until the answer is awaited."""
        self._marks.done(layer, micro_batch, rows)
        self._streams.fork()
        with self._streams.copying():
            yield

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """As :meth:`attention_worker.remote.RemoteExperts.send`, on the copying stream; within
        :meth:`sending`."""
        layout = self._resolved.a2f
        slots = self._slots.of(layer, ids)
        pending = self._pending[micro_batch] = encode(layout, layer, hidden, slots, weights)
        self._position += 1
        sequence = stream_sequence(self._position)
        flags = self._awaited[micro_batch] = [make_flag(p.session, sequence) for p in self._peers]
        for peer, flag in zip(self._peers, flags, strict=True):
            # A status says only that the peer is gone already; then the wait below tells.
            peer.link.enqueue(
                self._streams.copy,
                self._resolved.slots.to_ffn(self._index, micro_batch),
                flag,
                layer,
                micro_batch,
                pending.rows,
                self._depth,
                Kind.DATA,
                layout.tag,
                0,
                pending.parts(layout),
            )
        self._marks.copied()

    def recv(self, micro_batch: int) -> torch.Tensor:
        """As :meth:`attention_worker.remote.RemoteExperts.recv`, but what waits is the computing
        stream."""
        pending = self._pending[micro_batch]
        assert pending is not None, f"micro-batch {micro_batch} was not sent"
        count = len(self._peers)
        slots = [self._resolved.slots.to_attention(j, micro_batch) for j in range(count)]
        flags = self._awaited[micro_batch]
        self._region.enqueue_wait(self._streams.compute, slots, flags, reset=self._reset)
        self._marks.working()
        self._waits.slots += slots
        self._waits.flags += flags
        # The FFN instances have the rows: their memory may be used again from here on.
        self._pending[micro_batch] = None
        views = [of_ffn[micro_batch] for of_ffn in self._answers]
        return sum_of_ranks(views, self._tp, pending.rows, self._dtype)

    def end_step(self) -> None:
        self._marks.end()
        self._streams.join()

    def _answer(self, ffn: int, micro_batch: int) -> SlotView:
        memory = slot_bytes(self._region, self._resolved.slots.to_attention(ffn, micro_batch))
        return SlotView(memory, self._resolved.f2a)
