"""The sending half of the wire: posts micro-batches and keeps each one until it is answered.

Each micro-batch has its own receive slots on both sides. No slot needs a lock, because of the order
of its messages:

- The request of the next layer overwrites the last one in the FFN ranks' receive slots. It is
  posted after ``recv`` returned, so every rank has answered, and a rank answers after it has read.
- The answers to it overwrite the last ones in the receive slots here. They come after that request,
  and the sender waits for its device first, so the last answers have been used.
"""

from __future__ import annotations

from collections.abc import Sequence

from afd.config.resolve import Resolved
from afd.wire.layout import Kind
from afd.wire.message import message
from afd.wire.slot_view_torch import SlotView
from afd.wire.streams_torch import synchronize
from afd_comm import Group, Header, Region, Status, make_flag
from attention_worker.remote.encoded_batch import EncodedBatch
from attention_worker.remote.observer import StepObserver
from attention_worker.remote.sessions import POST_TIMEOUT_US, FfnSession


class Outbox:
    """What one attention rank has sent to the FFN ranks.

    ``j`` is the number of an FFN rank (:func:`afd.topology.rank_number`), ``k`` its place among the
    ranks in use: those of FFN instances without experts get no messages. A doorbell is the session
    number and a sequence number, packed by ``make_flag``. The answer to a message rings the same
    session and sequence number as the message.

    Not thread-safe: used by the model's forward only.

    Attributes:
        views: the receive slots of the answers, [micro-batch][k]. all_views: [micro-batch][j].
        unsent: FFN ranks that a post did not reach. Recovery renews their sessions, and then sends
            them every unanswered micro-batch again.
    """

    def __init__(
        self,
        resolved: Resolved,
        number: int,
        region: Region,
        observer: StepObserver,
        views: Sequence[Sequence[SlotView]],
    ) -> None:
        """number: of this attention rank. region: its receive slots. views: those of the answers,
        [micro-batch][j]."""
        slots, depth = resolved.slots, resolved.contract.max_depth
        self._region = region
        self._observer = observer
        self._layout = resolved.a2f
        self._data_slots = [slots.to_ffn(number, mb) for mb in range(depth)]
        self._control_slot = slots.control_to_ffn(number)
        self._slots = slots
        self.all_views = views
        self._elastic, self._tp = resolved.contract.elastic, resolved.contract.ffn_tp
        self._group = Group([], timeout_us=POST_TIMEOUT_US)
        self._batches: list[EncodedBatch | None] = [None] * depth  # posted, unanswered
        self._sources: list[EncodedBatch | None] = [None] * depth  # the same, with expert ids
        self._sessions: dict[int, FfnSession] = {}  # also of ranks that are not in use
        self._parked: dict[int, list[int]] = {}  # their last doorbells
        self._ranks: list[int] = []  # in use
        self._receivers = 0  # the FFN instances in use, as a request names them
        # The last doorbell per [micro-batch][k]. The last row: control messages.
        self._doorbells: list[list[int]] = [[] for _ in range(depth + 1)]
        # Header of the last answer per [micro-batch][k]. The next message returns its time stamps
        # to the FFN rank, which measures the wire with them (transport.trace).
        self._echoes: list[list[Header | None]] = []
        self._answer_slots: list[list[int]] = []  # [micro-batch][k]
        self.views: list[list[SlotView]] = []
        self._depth = 1
        self._step = 0
        self.unsent: set[int] = set()

    def begin_step(self, depth: int) -> None:
        self._depth = depth
        self._step += 1

    def send(self, micro_batch: int, source: EncodedBatch, batch: EncodedBatch) -> None:
        """Posts a dispatched micro-batch to the FFN ranks: to each the rows of its instance. The
        device has computed it.

        source: the same rows before dispatch, in case recovery has to dispatch them again.
        """
        self._sources[micro_batch], self._batches[micro_batch] = source, batch
        doorbells = self._doorbells[micro_batch] = [d + 1 for d in self._doorbells[micro_batch]]
        self._post(doorbells, micro_batch, batch)

    def tell(self, kind: Kind, rows: int, *, moves: int = 0) -> None:
        """Posts a control message to every FFN rank in use. moves: see
        :func:`afd.wire.message.message`.

        The statuses are ignored. The next wait finds a rank that is gone, and a lost
        ``Kind.LEAVE`` only costs other instances one ``ffn.step_wait_ms``.
        """
        doorbells = self._doorbells[-1] = [d + 1 for d in self._doorbells[-1]]
        order = message(
            self._control_slot,
            [],
            rows,
            layer=-1,
            micro_batch=-1,
            depth=self._depth,
            kind=kind,
            step=self._step,
            moves=moves,
            receivers=self._receivers,
        )
        self._group.broadcast(order, doorbells)

    def layer_of(self, micro_batch: int) -> int:
        """Returns the layer of an unanswered micro-batch."""
        return self.posted(micro_batch).layer

    def awaited(self, micro_batch: int, ranks: list[int]) -> tuple[list[int], list[int]]:
        """Returns the receive slots and doorbells of these FFN ranks' answers to a micro-batch."""
        slots, doorbells = self._answer_slots[micro_batch], self._doorbells[micro_batch]
        if len(ranks) == len(self._ranks):
            return slots, doorbells
        places = [self._ranks.index(j) for j in ranks]
        return [slots[k] for k in places], [doorbells[k] for k in places]

    def posted(self, micro_batch: int) -> EncodedBatch:
        """Returns an unanswered micro-batch, as it was sent."""
        batch = self._batches[micro_batch]
        assert batch is not None, f"micro-batch {micro_batch} was not sent"
        return batch

    def answered(self, micro_batch: int) -> None:
        """All FFN ranks have answered this micro-batch."""
        self._sources[micro_batch] = self._batches[micro_batch] = None
        self._echoes[micro_batch] = [
            self._region.header(slot) for slot in self._answer_slots[micro_batch]
        ]

    def sources(self) -> list[EncodedBatch | None]:
        """Returns the unanswered micro-batches as they were before dispatch, by number."""
        return self._sources

    def replace(self, batches: list[EncodedBatch | None]) -> None:
        """Replaces the unanswered micro-batches by newly dispatched ones; posts nothing. Waits for
        the device."""
        for batch in batches:
            if batch is not None:
                synchronize(batch.payload.device)
        self._batches = batches

    def start_session(self, j: int, session: FfnSession) -> None:
        """Starts the sequence numbers of FFN rank j again."""
        self._park()
        self._sessions[j] = session
        self._parked[j] = [make_flag(session.session, 0)] * len(self._doorbells)
        self._unpark()

    def use(self, ranks: Sequence[int]) -> None:
        """Sends to these FFN ranks from now on, ascending. Each needs a session."""
        self._park()
        self._ranks = [*ranks]
        self._receivers = 0
        for j in ranks if self._elastic else ():
            self._receivers |= 1 << j // self._tp
        self.unsent.intersection_update(ranks)
        self._unpark()

    def _park(self) -> None:
        for k, j in enumerate(self._ranks):
            self._parked[j] = [doorbells[k] for doorbells in self._doorbells]

    def _unpark(self) -> None:
        ranks, depth = self._ranks, len(self._batches)
        doorbells = [self._parked[j] for j in ranks]
        self._doorbells = [[of_rank[n] for of_rank in doorbells] for n in range(depth + 1)]
        self._echoes = [[None] * len(ranks) for _ in range(depth)]
        self._answer_slots = [
            [self._slots.to_attention(j, mb) for j in ranks] for mb in range(depth)
        ]
        self.views = [[of_batch[j] for j in ranks] for of_batch in self.all_views]
        links = [self._sessions[j].link for j in ranks]
        self._group = Group(links, timeout_us=POST_TIMEOUT_US)

    def send_again(self, j: int) -> None:
        """Posts every unanswered micro-batch to FFN rank j, in the order of the step.

        That includes micro-batches that the old session answered but that nobody has read: the old
        doorbells are void.
        """
        self.unsent.discard(j)
        at = self._ranks.index(j)
        waiting = [(b.layer, mb, b) for mb, b in enumerate(self._batches) if b is not None]
        for _, mb, batch in sorted(waiting, key=lambda item: item[:2]):
            self._doorbells[mb][at] += 1
            only_j = [d if k == at else 0 for k, d in enumerate(self._doorbells[mb])]
            self._post(only_j, mb, batch)

    def _post(self, doorbells: list[int], micro_batch: int, batch: EncodedBatch) -> None:
        """Posts to every FFN rank whose doorbell is not 0: all rows, or those of ``batch.plan``."""
        layout, slot, plan = self._layout, self._data_slots[micro_batch], batch.plan
        counts = [batch.rows] * len(doorbells) if plan is None else plan.of_ranks(self._ranks)
        sent = sum(rows for rows, doorbell in zip(counts, doorbells, strict=True) if doorbell)
        self._observer.posted(layout.message_bytes(sent))
        request = message(
            slot,
            batch.parts(layout) if plan is None else batch.row_parts(layout),
            batch.rows,
            layer=batch.layer,
            micro_batch=micro_batch,
            depth=self._depth,
            kind=Kind.DATA,
            tag=layout.tag,
            step=self._step,
            receivers=self._receivers,
        )
        echoes = self._echoes[micro_batch]
        if plan is None:
            statuses = self._group.broadcast(request, doorbells, echoes)
        else:
            # A rank without rows gets an empty message and answers it: all ranks run the same
            # calls, so each of them waits for one message per position.
            statuses = self._group.scatter(request, doorbells, counts, echoes)
        if statuses.count(Status.OK) < len(statuses):
            sent_to = zip(self._ranks, statuses, strict=True)
            self.unsent.update(j for j, status in sent_to if status != Status.OK)
