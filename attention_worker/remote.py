"""The remote half of a layer: rows go to every FFN rank, partial sums come back.

An FFN instance of several ranks answers in shares: each rank the sum of all for some of the rows.

The calls block and retry within their deadline: an exception in ``forward`` would end the vLLM
engine and with it every request's KV cache. An FFN instance keeps no request state, so one that was
restarted gets the unanswered micro-batches again.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from afd.control.client import ControlClient
from afd.errors import DeadlineExceeded
from afd.metrics import Direction, RoleMetrics, Stage
from afd.resolve import Resolved
from afd.step_trace import Marks, NoMarks, new_marks
from afd.wire.codecs_torch import DTYPE_OF_TAG
from afd.wire.layout import TAG_OF_DTYPE, Kind
from afd.wire.slot_torch import SlotView, sum_of_ranks, sum_of_shares
from afd.wire.streams_torch import HostStreams, settle, slot_bytes
from afd_comm import Group, Header, PeerTrace, Region, Status, make_flag
from attention_worker.ffn_sessions import POST_TIMEOUT_US, Ffn, FfnSessions
from attention_worker.outgoing import Outgoing, encode
from attention_worker.placing import Placing

logger = logging.getLogger("afd.attention")

_SLICE_US = 200_000
"""How long one wait lasts before lost peers are looked for, microseconds."""
_GONE_PAUSE_S = 0.02


class RemoteExperts:
    """Client of all FFN ranks of a deployment, for one attention instance; ``j`` is the number of
    one of them (:func:`afd.topology.ffn_number`).

    Not thread-safe: called from the model's forward only.
    """

    def __init__(
        self,
        resolved: Resolved,
        index: int,
        region: Region,
        control: ControlClient,
        metrics: RoleMetrics,
    ) -> None:
        self._resolved = resolved
        self._index = index
        self._region = region
        self._control = control
        self._metrics = metrics
        self._deadline_s = resolved.deployment.deadlines.ffn_s
        self._dtype = DTYPE_OF_TAG[TAG_OF_DTYPE[resolved.model.dtype]]
        self._count, self._tp = resolved.slots.ffn_ranks, resolved.contract.ffn_tp
        self._sessions = FfnSessions(resolved, index, region.device, control)
        self._unsent: set[int] = set()  # FFN ranks that did not get all that was sent to them
        self._group = Group([], timeout_us=POST_TIMEOUT_US)
        depth, count = resolved.contract.max_depth, self._count
        # What was posted and not yet answered, and the same rows before experts became slots.
        self._pending: list[Outgoing | None] = [None] * depth
        self._sources: list[Outgoing | None] = [None] * depth
        self._placing = Placing(resolved, index, control)
        self._answers = [[self._answer_view(j, mb) for mb in range(depth)] for j in range(count)]
        # Last doorbell and last answer per [micro-batch][FFN rank]; the last row: leaving.
        self._flags = [[0] * count for _ in range(depth + 1)]
        self._answered: list[list[Header | None]] = [[None] * count for _ in range(depth)]
        if resolved.deployment.transport.trace:
            for j in range(count):
                trace = PeerTrace()
                region.trace(resolved.slots.attention_claim(j), trace)
                metrics.wire_traces[self._sessions.name(j)] = trace
        self._stage_every = resolved.deployment.metrics.stage_every
        self._marks: Marks = NoMarks()
        self._began_ns = 0
        self._depth = 1
        self._step = 0
        self._present = False
        self._mark = time.monotonic()

    def connect(self, deadline_s: float) -> None:
        """Wait until every FFN instance is ready and link to it.

        Raises:
            DeadlineExceeded: names the instances that did not come.
        """
        self._sessions.connect(deadline_s)
        self._placing.start()
        for j in range(self._count):
            self._start_session(j)
        self._metrics.peers_up = self._count

    def begin_step(self, depth: int) -> None:
        """Start a step of ``depth`` micro-batches; renew sessions that ended since the last one."""
        deadline = time.monotonic() + self._deadline_s
        while self._renewed(range(self._count), deadline):
            pass  # another one may have ended meanwhile
        self._placing.begin_step()
        self._depth = depth
        self._step += 1
        self._present = True
        self._mark = time.monotonic()
        self._marks = new_marks(HostStreams(), self._step, self._stage_every)
        self._began_ns = time.monotonic_ns()
        self._marks.begin()

    def end_step(self) -> None:
        self._marks.end()
        trace = self._marks.read(self._began_ns, replayed=False)
        if trace is not None:
            self._metrics.step_traces.add(trace)
        self._metrics.steps[self._depth] += 1
        self._placing.end_step()

    def announce(self, rows: int) -> None:
        """Tell the FFN instances that a step of ``rows`` rows follows whose doorbells our streams
        ring, at the depth given to :meth:`begin_step`."""
        resolved, count = self._resolved, self._count
        nbytes = len(resolved.model.moe_layers) * resolved.a2f.message_bytes(rows)
        self._metrics.wire_bytes[Direction.A2F] += count * nbytes
        self._tell(Kind.STEP, rows)

    def leave(self) -> None:
        """Tell the FFN instances that nothing is coming, so that no other instance's step waits."""
        if not self._present:  # one leave per stay: the receiver takes them one by one
            return
        self._present = False
        self._tell(Kind.LEAVE, 0)

    def sending(self, layer: int, micro_batch: int, rows: int) -> AbstractContextManager[object]:
        """Nothing: what the host posts is computed first."""
        return nullcontext()

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Post one micro-batch to every FFN instance; does not wait for the answer.

        Args:
            hidden: model dtype [rows, hidden]. ids: int32 [rows, top_k], global expert ids,
                -1 where nobody is to compute.
            weights: float32 [rows, top_k].

        Raises:
            CapacityExceeded: more rows than a slot holds.
        """
        source = encode(self._resolved.a2f, layer, hidden, ids, weights)
        pending = self._placing.placed(source)
        self._sources[micro_batch], self._pending[micro_batch] = source, pending
        now = time.monotonic()
        self._metrics.stage(Stage.ATTENTION).observe(now - self._mark)
        self._marks.done(layer, micro_batch, source.rows)
        self._metrics.slots_in_flight += self._count
        flags = self._flags[micro_batch] = [flag + 1 for flag in self._flags[micro_batch]]
        self._post(flags, micro_batch, pending)
        self._marks.copied()
        self._mark = time.monotonic()

    def recv(self, micro_batch: int) -> torch.Tensor:
        """Sum of all partial results of a posted micro-batch: model dtype [rows, hidden].

        With one FFN process and the exact wire this is the slot's own memory, valid until the
        micro-batch is sent again.

        Raises:
            DeadlineExceeded: an FFN rank neither answered nor came back in ``deadlines.ffn_s``.
        """
        pending = self._pending[micro_batch]
        assert pending is not None, f"micro-batch {micro_batch} was not sent"
        started = time.monotonic()
        deadline = started + self._deadline_s
        missing = list(range(self._count))
        while missing:
            slots = [self._resolved.slots.to_attention(j, micro_batch) for j in missing]
            flags = [self._flags[micro_batch][j] for j in missing]
            before = time.monotonic()
            statuses = self._region.wait_all(slots, flags, _SLICE_US)
            # Longer than it was to last: this process stood still, which is nobody else's fault.
            deadline += max(0.0, time.monotonic() - before - _SLICE_US / 1e6)
            waiting = list(zip(missing, statuses, strict=True))
            missing = [j for j, status in waiting if status != Status.OK]
            gone = (j for j, status in waiting if status == Status.PEER_GONE)
            self._sessions.cut_off({*self._unsent, *gone})
            missing = sorted({*missing, *self._renewed(missing, deadline)})
            if Status.PEER_GONE in statuses:
                # The transport sees a death at once, the control plane a heartbeat later.
                time.sleep(_GONE_PAUSE_S)
            if missing and time.monotonic() > deadline:
                names = ", ".join(self.peers[j].id for j in missing)
                raise DeadlineExceeded(
                    f"{names} did not answer layer {pending.layer} within {self._deadline_s:g} s; "
                    "look at its log, or raise deadlines.ffn_s if its experts are that slow"
                )
        self._mark = time.monotonic()
        self._metrics.bubble_seconds += self._mark - started
        self._marks.working()
        pending = self._pending[micro_batch] or pending
        self._sources[micro_batch] = self._pending[micro_batch] = None
        self._metrics.slots_in_flight -= self._count
        self._answered[micro_batch] = [
            self._region.header(self._resolved.slots.to_attention(j, micro_batch))
            for j in range(self._count)
        ]
        views = [of_ffn[micro_batch] for of_ffn in self._answers]
        if pending.shares is None:
            return sum_of_ranks(views, self._tp, pending.rows, self._dtype)
        shares, hidden = pending.shares.of_instances(), self._resolved.model.hidden
        return sum_of_shares(views, self._tp, shares, pending.rows, hidden, self._dtype)

    @property
    def peers(self) -> tuple[Ffn, ...]:
        """Sessions with all FFN instances, by index; replaced where one is renewed."""
        return self._sessions.all

    def renew(self, lost: Sequence[int]) -> None:
        """Wait until the FFN ranks of these numbers, which were lost in a step, are back.

        Raises:
            DeadlineExceeded: one did not come back in ``deadlines.ffn_s``.
        """
        deadline = time.monotonic() + self._deadline_s
        before = self.peers
        while waiting := [j for j in lost if self.peers[j] is before[j]]:
            if not self._renewed(waiting, deadline):
                if time.monotonic() > deadline:
                    names = ", ".join(self.peers[j].id for j in waiting)
                    raise DeadlineExceeded(f"{names} cannot be reached; look at its log")
                self._sessions.cut_off(waiting)
                time.sleep(_GONE_PAUSE_S)

    def close(self) -> None:
        self._sessions.close()
        self._region.close()

    def _post(self, flags: list[int], micro_batch: int, pending: Outgoing) -> None:
        """To every FFN instance whose flag is not 0. Who did not get it is found out about, and
        gets it, while its answer is waited for."""
        layout, slots = self._resolved.a2f, self._resolved.slots
        slot, answered = slots.to_ffn(self._index, micro_batch), self._answered[micro_batch]
        shares = pending.shares
        counts = [pending.rows] * len(flags) if shares is None else shares.of_ranks()
        sent = sum(rows for rows, flag in zip(counts, flags, strict=True) if flag)
        self._metrics.wire_bytes[Direction.A2F] += layout.message_bytes(sent)
        settle(pending.payload.device)
        layer, depth, step = pending.layer, self._depth, self._step
        if shares is None:
            statuses = self._group.broadcast(
                slot, flags, layer, micro_batch, pending.rows, depth, Kind.DATA, layout.tag, step,
                pending.parts(layout), answered,
            )  # fmt: skip
        else:
            # Who computes none of the rows gets a message without any, and answers it: the order of
            # its messages is the order of the step for everybody.
            statuses = self._group.scatter(
                slot, flags, layer, micro_batch, counts, depth, Kind.DATA, layout.tag, step,
                pending.row_parts(layout), answered,
            )  # fmt: skip
        self._unsent.update(j for j, status in enumerate(statuses) if status != Status.OK)

    def _tell(self, kind: Kind, rows: int) -> None:
        slot = self._resolved.slots.control_to_ffn(self._index)
        flags = self._flags[-1] = [flag + 1 for flag in self._flags[-1]]
        # Who does not get it is gone, and found out by the next wait; a lost leave only costs the
        # others one step_wait. So the statuses are not looked at.
        self._group.broadcast(slot, flags, -1, -1, rows, self._depth, kind, 0, self._step, [])

    def _renewed(self, ranks: Sequence[int], deadline: float) -> set[int]:
        """Renew the sessions that ended, of these FFN ranks; answers whose were renewed.

        If the control plane had given this instance up, all have ended. The others did not wait for
        us: experts may have moved in mid-step, and what is unanswered goes to their new places.
        """
        if self._sessions.rejoined():
            self._placing.begin_anew()
            self._pending = [s if s is None else self._placing.placed(s) for s in self._sources]
            ended = list(range(self._count))
        else:
            ended = [j for j in ranks if self._sessions.is_lost(j)]
        renewed: set[int] = set()
        for j in ended:
            if j not in renewed:
                self._recover(j, deadline)
                renewed.update(self._sessions.instance_of(j))
        return renewed

    def _recover(self, j: int, deadline: float) -> None:
        """Wait until FFN rank j is back and send its instance what was not answered.

        The ranks of an instance start again together, and add up what they are all sent.
        """
        for k in reversed(self._sessions.instance_of(j)):
            self._resume(k, deadline)  # what the first rank has, the others look for

    def _resume(self, j: int, deadline: float) -> None:
        logger.warning("%s is gone; waiting for it to come back", self._sessions.name(j))
        fresh = self._sessions.renew(j, deadline)
        self._start_session(j)
        self._unsent.discard(j)
        self._metrics.ffn_retries += 1
        # Also what the old session had answered but nobody has read: its doorbells are void now.
        waiting = [(p.layer, mb, p) for mb, p in enumerate(self._pending) if p is not None]
        for _, mb, pending in sorted(waiting, key=lambda item: item[:2]):
            self._flags[mb][j] += 1
            flags = [flag if k == j else 0 for k, flag in enumerate(self._flags[mb])]
            self._post(flags, mb, pending)
        logger.warning("%s is back (session %d); resumed", fresh.id, fresh.session)

    def _start_session(self, j: int) -> None:
        """Sequence numbers of FFN instance j begin anew; nothing it answered before is echoed."""
        for flags in self._flags:
            flags[j] = make_flag(self.peers[j].session, 0)
        for answered in self._answered:
            answered[j] = None
        self._group = Group([ffn.link for ffn in self.peers], timeout_us=POST_TIMEOUT_US)

    def _answer_view(self, ffn: int, micro_batch: int) -> SlotView:
        memory = slot_bytes(self._region, self._resolved.slots.to_attention(ffn, micro_batch))
        return SlotView(memory, self._resolved.f2a)
