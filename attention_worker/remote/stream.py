"""The remote experts in stream form: operations of GPU streams, nothing waits on the host.

Used while a step is captured. The graph then holds the copies to the FFN ranks, their doorbells and
the waits for the answers, so a replay runs the whole step without the host
(:mod:`attention_worker.vllm_hooks.graphs`). A doorbell numbers a position of the step, so every
replay rings the same doorbells (:func:`afd.schedule.stream_sequence`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from afd.config.resolve import Resolved
from afd.metrics.step_trace import NoTimestamps, StageTimestamps
from afd.schedule import resets_doorbells, stream_sequence
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import TAG_OF_DTYPE, Kind
from afd.wire.message import message
from afd.wire.slot_torch import sum_of_ranks
from afd.wire.streams_torch import Streams
from afd_comm import Region, make_flag
from attention_worker.remote.encoded_batch import EncodedBatch, encode
from attention_worker.remote.expert_slots import ExpertSlotMap
from attention_worker.remote.host import answer_views
from attention_worker.remote.sessions import FfnSession


@dataclass
class Waits:
    """The doorbells that a captured step waits for, in order: per wait, one of every FFN rank.

    A guard rings them in place of a peer that died.
    """

    slots: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)


class StreamExperts:
    """Records one step at a time; see :class:`attention_worker.pipeline.Experts`.

    A recording is tied to the sessions it was made with: once one of them ends, its graph is void.
    """

    def __init__(self, resolved: Resolved, index: int, region: Region, streams: Streams) -> None:
        """index: of this attention instance. region: its receive slots."""
        depth = resolved.contract.max_depth
        self.streams = streams
        self._resolved = resolved
        self._index = index
        self._region = region
        self._dtype = DTYPE_OF_TAG[TAG_OF_DTYPE[resolved.model.dtype]]
        self._answers = answer_views(resolved, region)
        self._tp = resolved.contract.ffn_tp
        self._reset = resets_doorbells(resolved.model.moe_layers)
        self._batches: list[EncodedBatch | None] = [None] * depth
        self._awaited: list[list[int]] = [[] for _ in range(depth)]
        self._slots = ExpertSlotMap(resolved, index)
        self._peers: tuple[FfnSession, ...] = ()
        self._waits = Waits()
        self._timestamps: StageTimestamps = NoTimestamps()
        self._depth = 1
        self._position = 0

    def record(self, peers: tuple[FfnSession, ...], timestamps: StageTimestamps) -> Waits:
        """Prepares to record the step that the model runs next.

        Args:
            peers: the sessions that the step uses.
            timestamps: receives the stage timestamps of every replay.

        Returns:
            The wait list of the step, filled in as the step is recorded.
        """
        self._peers = peers
        self._timestamps = timestamps
        self._waits = Waits()
        return self._waits

    def begin_step(self, depth: int) -> None:
        self._depth = depth
        self._position = 0
        self._timestamps.begin()

    @contextmanager
    def sending(self, layer: int, micro_batch: int, rows: int) -> Iterator[None]:
        """Moves the router and the encoding to the copy stream, behind all work queued so far.

        The tensors that they read have to stay alive until the answer is awaited.
        """
        self._timestamps.done(layer, micro_batch, rows)
        self.streams.fork()
        with self.streams.copying():
            yield

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """:meth:`attention_worker.remote.host.RemoteExperts.send`, queued on the copy stream.

        Call it within :meth:`sending`.
        """
        layout = self._resolved.a2f
        slots = self._slots.of(layer, ids)
        batch = self._batches[micro_batch] = encode(layout, layer, hidden, slots, weights)
        self._position += 1
        sequence = stream_sequence(self._position)
        doorbells = [make_flag(peer.session, sequence) for peer in self._peers]
        self._awaited[micro_batch] = doorbells
        request = message(
            self._resolved.slots.to_ffn(self._index, micro_batch),
            batch.parts(layout),
            batch.rows,
            layer=layer,
            micro_batch=micro_batch,
            depth=self._depth,
            kind=Kind.DATA,
            tag=layout.tag,
        )
        for peer, doorbell in zip(self._peers, doorbells, strict=True):
            # The status is ignored: it says that the peer is gone, and so does the wait in recv().
            peer.link.enqueue(self.streams.copy, request, doorbell)
        self._timestamps.copied()

    def recv(self, micro_batch: int) -> torch.Tensor:
        """:meth:`attention_worker.remote.host.RemoteExperts.recv`; the compute stream waits."""
        batch = self._batches[micro_batch]
        assert batch is not None, f"micro-batch {micro_batch} was not sent"
        count, doorbells = len(self._peers), self._awaited[micro_batch]
        slots = [self._resolved.slots.to_attention(j, micro_batch) for j in range(count)]
        self._region.enqueue_wait(self.streams.compute, slots, doorbells, reset=self._reset)
        self._timestamps.working()
        self._waits.slots += slots
        self._waits.flags += doorbells
        # The FFN ranks have the rows, so the memory of the batch may be reused from here on.
        self._batches[micro_batch] = None
        return sum_of_ranks(self._answers[micro_batch], self._tp, batch.rows, self._dtype)

    def end_step(self) -> None:
        self._timestamps.end()
        self.streams.join()
