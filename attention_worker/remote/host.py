"""The remote experts in host form: this process sends and waits, message by message.

The path of a healthy step is this file. Lost FFN ranks, renewed sessions and deadlines are in
:mod:`attention_worker.remote.recovery`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from afd.config.resolve import Resolved
from afd.control.client import ControlClient
from afd.errors import PeerLost
from afd.metrics.role import RoleMetrics
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import TAG_OF_DTYPE, Kind
from afd.wire.message import follows_count
from afd.wire.rows_torch import EncodedRows
from afd.wire.slot_torch import sum_of_ranks, sum_of_shares
from afd.wire.slot_view_torch import SlotView
from afd.wire.streams_torch import slot_bytes, synchronize
from afd_comm import PeerTrace, Region
from attention_worker.remote.dispatcher import Dispatcher
from attention_worker.remote.encoded_batch import EncodedBatch, encode
from attention_worker.remote.expert_slots import ExpertSlotMap
from attention_worker.remote.launch_ahead import LaunchAhead
from attention_worker.remote.observer import StepObserver
from attention_worker.remote.outbox import Outbox
from attention_worker.remote.recovery import WAIT_SLICE_US, Recovery
from attention_worker.remote.sessions import FfnSession, FfnSessions, run_alone


class RemoteExperts:
    """Client of the FFN ranks of a deployment, for one attention rank.

    Sends the rows of a micro-batch to the FFN ranks, and makes the FFN output from their answers.
    FFN instances that hold no experts are left out.

    - All ranks of one FFN instance get the same rows. Each returns a share of them: different rows,
      already summed over the ranks. Both sides compute the shares with
      :func:`afd.schedule.row_shares`, so a message need not say which rows it carries.
    - Each FFN instance holds a part of the experts. The results of different instances for the same
      row are partial, and are added up here.

    Not thread-safe: called by the model's forward only.
    """

    def __init__(
        self,
        resolved: Resolved,
        number: int,
        region: Region,
        control: ControlClient,
        metrics: RoleMetrics,
    ) -> None:
        """number: of this rank among all attention ranks. region: its receive slots."""
        self._resolved = resolved
        self._region = region
        self._layout = resolved.a2f
        self._hidden = resolved.model.hidden
        self._dtype = DTYPE_OF_TAG[TAG_OF_DTYPE[resolved.model.dtype]]
        self._tp = resolved.contract.ffn_tp
        self._sessions = FfnSessions(resolved, number, region.device, control)
        self._observer = StepObserver(metrics, resolved.deployment.metrics.stage_every)
        self._dispatcher = Dispatcher(resolved, number, control)
        views = answer_views(resolved, region)
        self._outbox = Outbox(resolved, number, region, self._observer, views)
        self._recovery = Recovery(
            self._sessions,
            self._outbox,
            self._dispatcher,
            self._observer,
            resolved.deployment.deadlines.ffn_s,
        )
        self._ahead: LaunchAhead | None = None  # see launch_ahead()
        self._goes_ahead = False  # in this step
        self._kept: tuple[FfnSession, ...] = ()
        self._announced = 0  # rows of the last announced step
        self._active = False  # a step has begun since the last leave()
        if resolved.deployment.transport.trace:
            for j in range(resolved.slots.ffn_ranks):
                trace = metrics.wire_traces[self._sessions.name(j)] = PeerTrace()
                region.trace(resolved.slots.attention_claim(j), trace)

    # The path of a healthy step.

    def begin_step(self, depth: int, *, draft: bool = False) -> None:
        """Begins a step of ``depth`` micro-batches. draft: it is one draft layer.

        Raises:
            DeadlineExceeded: an FFN rank was lost and did not come back in ``deadlines.ffn_s``.
        """
        self._dispatcher.begin_step()
        self._recovery.renew_ended_sessions()
        self._outbox.begin_step(depth)
        self._goes_ahead = self._ahead is not None and run_alone(self._region, self.peers)
        self._active = True
        self._observer.begin_step(depth, draft=draft)

    def sending(self, layer: int, micro_batch: int, rows: int) -> AbstractContextManager[object]:
        """Returns an empty context: in host form there is no other stream to move the work to."""
        return nullcontext()

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        encoded: EncodedRows | None = None,
    ) -> None:
        """Posts one micro-batch to the FFN ranks; does not wait for the answers.

        Args:
            hidden: model dtype [rows, hidden].
            ids: int32 [rows, top_k], global expert ids; -1: no routed expert computes the pair.
            weights: float32 [rows, top_k].
            encoded: the rows in the format of the wire; None: they are encoded here.

        Raises:
            CapacityExceeded: more rows than a receive slot holds; raised by ``encode``.
        """
        source = encode(self._layout, layer, hidden, ids, weights, encoded)
        self._settle()
        # Replaces expert ids by expert slots: an expert may have copies, and may move. If
        # wire.dispatch is routed, the result has a plan: which rows go to which FFN instance, with
        # the rows sorted that way. Without a plan every FFN instance gets all rows.
        batch = self._dispatcher.dispatch(source)
        synchronize(batch.payload.device)
        self._observer.computed(layer, micro_batch, batch.rows)
        self._outbox.send(micro_batch, source, batch)
        self._observer.sent()

    def recv(self, micro_batch: int) -> torch.Tensor:
        """Waits for the answers of all FFN ranks to a micro-batch.

        Returns:
            The FFN output, model dtype [rows, hidden]. With one FFN rank and ``wire.format: exact``
            (answers in the model dtype) this is the memory of the receive slot, valid until the
            micro-batch is sent again.

        Raises:
            DeadlineExceeded: an FFN rank neither answered nor came back in ``deadlines.ffn_s``.
        """
        self._settle()
        batch = self._outbox.posted(micro_batch)
        if self._goes_ahead:
            self._queue_behind_answers(micro_batch, batch)
        else:
            batch = self._await_answers(micro_batch)
        views = self._outbox.views[micro_batch]
        if batch.plan is None:
            return sum_of_ranks(views, self._tp, batch.rows, self._dtype)
        shares = self._dispatcher.shares(batch.plan)
        return sum_of_shares(views, self._tp, shares, batch.rows, self._hidden, self._dtype)

    def end_step(self) -> None:
        """Ends a step whose answers have all been received."""
        self._settle()
        self._observer.end_step()
        self._dispatcher.end_step()

    def _await_answers(self, micro_batch: int) -> EncodedBatch:
        """Waits for the answers on the host. Returns the micro-batch that was answered: recovery
        may have dispatched it again."""
        self._observer.waiting()
        self._recovery.begin_wait()
        ranks = self._sessions.ranks
        while ranks:
            slots, doorbells = self._outbox.awaited(micro_batch, ranks)
            statuses = self._region.wait_all(slots, doorbells, WAIT_SLICE_US)
            ranks = self._recovery.recover_missing(micro_batch, ranks, statuses)
        self._observer.working()
        batch = self._outbox.posted(micro_batch)
        self._outbox.answered(micro_batch)
        return batch

    def _queue_behind_answers(self, micro_batch: int, batch: EncodedBatch) -> None:
        """Lets the stream wait for the answers to a micro-batch, as it was sent."""
        assert self._ahead is not None
        ranks = self._sessions.ranks
        slots, doorbells = map(list, self._outbox.awaited(micro_batch, ranks))

        def answered() -> list[int]:
            now = self._await_answers(micro_batch)
            same = now is batch or now.plan is None
            if not same or self._sessions.ranks != ranks:
                raise PeerLost(
                    "the control plane had given this instance up, and experts have moved since;"
                    " the engine ends, and its requests go on elsewhere or when it is back"
                )
            return self._outbox.awaited(micro_batch, ranks)[1]

        # Freeing a link unmaps memory, and the driver does that on an idle device only.
        self._kept = self.links
        self._ahead.wait(slots, doorbells, answered)

    def _settle(self) -> None:
        if self._ahead is not None:
            self._ahead.settle()

    # Around the steps.

    def launch_ahead(self, ahead: LaunchAhead) -> None:
        """From now on the host queues work behind answers, if the transport allows it."""
        self._ahead = ahead

    def connect(self, deadline_s: float) -> None:
        """Waits until every FFN rank that holds experts is ready, and links to it.

        Raises:
            DeadlineExceeded: names the ranks that are not ready after ``deadline_s`` seconds.
        """
        self._dispatcher.start()
        self._sessions.connect(lambda: self._dispatcher.slots.instances, deadline_s)
        for j in self._sessions.ranks:
            self._outbox.start_session(j, self._sessions.of(j))
        self._outbox.use(self._sessions.ranks)
        self._observer.connected(len(self._sessions.ranks))
        self._warm_up_sums()

    def _warm_up_sums(self) -> None:
        """Adds up answers once for every number of FFN instances. Later, a driver that loads a
        kernel may wait for an idle device, which a stream that waits for answers never is."""
        views, tp = self._outbox.all_views[0], self._tp
        for ranks in range(tp, len(views) + 1, tp):
            sum_of_ranks(views[:ranks], tp, tp, self._dtype)
        row = torch.zeros(1, dtype=torch.int64, device=views[0].payload.device)
        sum_of_shares(views[:tp], tp, [row], 1, self._hidden, self._dtype)

    def announce(self, rows: int) -> None:
        """Tells the FFN ranks that a replayed step of ``rows`` rows follows.

        A replayed step is one GPU graph (:mod:`attention_worker.vllm_hooks.graphs`), which sends
        the messages of the step itself. Its depth is the one given to :meth:`begin_step`.
        """
        self._announced = rows
        self._outbox.tell(Kind.STEP, rows, moves=self._dispatcher.moves)

    def end_replay(self, rows_sent: Sequence[int]) -> None:
        """Ends the announced step. rows_sent: see :attr:`StreamExperts.rows_sent`."""
        layout, peers = self._layout, self.peers
        whole = len(self._resolved.model.step_layers) * self._announced
        nbytes = len(peers) * layout.message_bytes(whole)
        for peer in peers if rows_sent else ():
            if follows_count(peer.link.backend):
                left_out = whole - rows_sent[peer.rank // self._tp]
                nbytes -= left_out * (layout.message_bytes(1) - 4 * layout.top_k)  # ids travel
        self._observer.posted(nbytes)
        self.end_step()

    def leave(self) -> None:
        """Tells the FFN ranks that no step follows for now, so that no other instance waits for
        this one."""
        # Only once after a step: a second one might overwrite the first before it is read.
        if self._active:
            self._active = False
            self._outbox.tell(Kind.LEAVE, 0)

    @property
    def expert_slots(self) -> ExpertSlotMap:
        """The expert placement in use; it changes between two steps only."""
        return self._dispatcher.slots

    @property
    def peers(self) -> tuple[FfnSession, ...]:
        """The session with each FFN rank in use, by its number. A renewed session is a new
        object."""
        return self._sessions.all

    @property
    def links(self) -> tuple[FfnSession, ...]:
        """The sessions with all FFN ranks, also those that hold no experts now."""
        return self._sessions.kept

    def reconnect(self, lost: Sequence[int]) -> None:
        """Waits until the FFN ranks that were lost in a replayed step are back.

        Raises:
            DeadlineExceeded: one did not come back in ``deadlines.ffn_s``.
        """
        self._recovery.reconnect(lost)

    def close(self) -> None:
        self._sessions.close()
        self._region.close()


def answer_views(resolved: Resolved, region: Region) -> list[list[SlotView]]:
    """Returns the receive slots of the answers, [micro-batch][FFN rank]."""

    def view(j: int, micro_batch: int) -> SlotView:
        memory = slot_bytes(region, resolved.slots.to_attention(j, micro_batch))
        return SlotView(memory, resolved.f2a)

    return [
        [view(j, mb) for j in range(resolved.slots.ffn_ranks)]
        for mb in range(resolved.contract.max_depth)
    ]
