"""The remote experts in stream form: operations of GPU streams, nothing waits on the host.

Used while a step is captured. The graph then holds the copies to the FFN ranks, their doorbells and
the waits for the answers, so a replay runs the whole step without the host
(:mod:`attention_worker.vllm_hooks.graphs`). A doorbell numbers a position of the step, so every
replay rings the same doorbells (:func:`afd.schedule.stream_sequence`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from afd.config.resolve import Resolved
from afd.metrics.step_trace import NoTimestamps, StageTimestamps
from afd.schedule import resets_doorbells, stream_sequence
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import TAG_OF_DTYPE, Kind
from afd.wire.message import message
from afd.wire.rows_torch import EncodedRows
from afd.wire.slot_torch import PlacedAnswers, sum_of_ranks
from afd.wire.streams_torch import Streams, torch_device
from afd_comm import Message, Region, make_flag
from attention_worker.remote.encoded_batch import EncodedBatch, encode
from attention_worker.remote.expert_slots import ExpertSlotMap
from attention_worker.remote.host import answer_views
from attention_worker.remote.sessions import FfnSession
from attention_worker.remote.stream_dispatch import Places, StreamSplitter


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

    def __init__(
        self,
        resolved: Resolved,
        number: int,
        region: Region,
        streams: Streams,
        expert_slots: ExpertSlotMap,
    ) -> None:
        """number: of this attention rank. region: its receive slots. expert_slots: the placement
        that each replay uses; it changes between two steps only."""
        depth = resolved.contract.max_depth
        self.streams = streams
        self._resolved = resolved
        self._layout = resolved.a2f
        self._number = number
        self._region = region
        self._dtype = DTYPE_OF_TAG[TAG_OF_DTYPE[resolved.model.dtype]]
        self._answers = answer_views(resolved, region)
        self._slots = expert_slots
        # Routed dispatch: by micro-batch, the answers and where each row is in them.
        self._splitter: StreamSplitter | None = None
        self._placed: list[PlacedAnswers] = []
        self._places: list[Places | None] = [None] * depth
        if resolved.dispatch == "routed":
            bounds = resolved.placement.bounds
            device = torch_device(resolved.deployment.attention.device)
            self._splitter = StreamSplitter(bounds, depth, device)
            tp = resolved.contract.ffn_tp
            self._placed = [PlacedAnswers(views, tp) for views in self._answers]
        self._tp = resolved.contract.ffn_tp
        self._reset = resets_doorbells(resolved.model.step_layers)
        self._batches: list[Sequence[EncodedBatch] | None] = [None] * depth
        self._awaited: list[list[int]] = [[] for _ in range(depth)]
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
        self.streams.begin_step(depth)
        if self._splitter is not None:
            self._splitter.begin_step()
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
        encoded: EncodedRows | None = None,
    ) -> None:
        """:meth:`attention_worker.remote.host.RemoteExperts.send`, queued on the copy stream.

        Call it within :meth:`sending`.
        """
        slots = self._slots.of_replays(layer, ids)
        batch = encode(self._layout, layer, hidden, slots, weights, encoded)
        requests = self._requests(micro_batch, batch)
        self._position += 1
        sequence = stream_sequence(self._position)
        doorbells = [make_flag(peer.session, sequence) for peer in self._peers]
        self._awaited[micro_batch] = doorbells
        for peer, doorbell in zip(self._peers, doorbells, strict=True):
            request, count = requests[peer.rank // self._tp]
            # The status is ignored: it says that the peer is gone, and so does the wait in recv().
            peer.link.enqueue(self.streams.copy, request, doorbell, count)
        self._timestamps.copied()

    def recv(self, micro_batch: int) -> torch.Tensor:
        """:meth:`attention_worker.remote.host.RemoteExperts.recv`; the compute stream waits."""
        batches = self._batches[micro_batch]
        assert batches is not None, f"micro-batch {micro_batch} was not sent"
        ranks, doorbells = [peer.rank for peer in self._peers], self._awaited[micro_batch]
        slots = [self._resolved.slots.to_attention(rank, micro_batch) for rank in ranks]
        self._region.enqueue_wait(self.streams.compute, slots, doorbells, reset=self._reset)
        self._timestamps.working()
        self._waits.slots += slots
        self._waits.flags += doorbells
        # The FFN ranks have the rows, so the memory of the batch may be reused from here on.
        self._batches[micro_batch] = None
        places, self._places[micro_batch] = self._places[micro_batch], None
        if places is not None:
            return self._placed[micro_batch].sum(places.of_rows, self._dtype)
        answers = [self._answers[micro_batch][rank] for rank in ranks]
        return sum_of_ranks(answers, self._tp, batches[0].rows, self._dtype)

    def end_step(self) -> None:
        self._timestamps.end()
        if self._splitter is not None:
            with self.streams.copying():
                self._splitter.end_step()
        self.streams.join()

    @property
    def rows_sent(self) -> Sequence[int]:
        """Routed dispatch: the rows to each FFN instance in the last step that has ended, over all
        layers. Broadcast: empty."""
        return () if self._splitter is None else self._splitter.sent_in_step

    def _requests(self, micro_batch: int, batch: EncodedBatch) -> list[tuple[Message, int]]:
        """Returns the message to each FFN instance, and the address of its number of rows; 0: all.
        Keeps its memory until the answer is awaited."""
        if self._splitter is None:
            self._batches[micro_batch] = (batch,)
            request = self._request(micro_batch, batch)
            return [(request, 0)] * self._resolved.contract.ffn_instances
        split = self._splitter.split(micro_batch, batch)
        self._batches[micro_batch], self._places[micro_batch] = split.batches, split.places
        requests = [self._request(micro_batch, part) for part in split.batches]
        return list(zip(requests, split.counts, strict=True))

    def _request(self, micro_batch: int, batch: EncodedBatch) -> Message:
        """The ids travel whole, and -1 beyond the number of rows, so that the FFN instance need not
        know the number to compute nothing there."""
        return message(
            self._resolved.slots.to_ffn(self._number, micro_batch),
            batch.parts(self._layout),
            batch.rows,
            layer=batch.layer,
            micro_batch=micro_batch,
            depth=self._depth,
            kind=Kind.DATA,
            tag=self._layout.tag,
            whole=1,
        )
