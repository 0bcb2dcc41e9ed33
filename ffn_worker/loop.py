"""The loop of an FFN process: the mirror image of the attention side's layer pipeline.

Every process of the pool runs the same calls in the same order. One decides them
(:mod:`ffn_worker.leader`), the others follow (:mod:`ffn_worker.follower`); whoever knows what comes
next passes it on and runs it.
"""

import logging
import time
from collections.abc import Sequence

import torch

from afd.control.client import ControlClient
from afd.errors import PeerLost
from afd.metrics import Direction, RoleMetrics, Stage
from afd.resolve import Resolved
from afd.schedule import Position
from afd.step_trace import Marks, NoMarks, new_marks
from afd.wire.layout import Kind
from afd.wire.streams_torch import HostStreams, make_streams, settle
from afd_comm import Header, PeerTrace, Region, Status, make_flag
from ffn_worker.answers import Answers
from ffn_worker.arrivals import Arrivals
from ffn_worker.calls import Call
from ffn_worker.follower import Head, Rank
from ffn_worker.inbox import Inbox
from ffn_worker.leader import Leader
from ffn_worker.model import FfnModel
from ffn_worker.moves import ExpertMoves
from ffn_worker.peers import Peer, PeerTable
from ffn_worker.ranks import Ranks
from ffn_worker.shares import Shares
from ffn_worker.steps import StreamSteps
from ffn_worker.stuck import CallClock

logger = logging.getLogger("afd.ffn")


class FfnLoop:
    """Serves every attention instance of the deployment from one thread."""

    def __init__(
        self,
        resolved: Resolved,
        region: Region,
        control: ControlClient,
        model: FfnModel,
        ranks: Ranks,
        metrics: RoleMetrics,
    ) -> None:
        """ranks: this process among the others, which it has met."""
        self._resolved = resolved
        self._region = region
        self._control = control
        self._model = model
        self._ranks = ranks
        self._metrics = metrics
        self.moves = ExpertMoves(resolved, model, control, self.wake)
        number = ranks.place.number
        self._inbox = Inbox(region, resolved)
        self._table = PeerTable(resolved, number, region.device)
        self._shares = Shares(ranks.collective)
        self._steps = StreamSteps(
            resolved,
            region,
            self._inbox,
            model,
            self._shares,
            make_streams(model.device, resolved.contract.max_depth),
            number,
            metrics,
        )
        self._source = self._make_source(Arrivals(resolved, region, self._inbox, self._table))
        if resolved.deployment.transport.trace:
            for i in range(resolved.deployment.attention.instances):
                trace = PeerTrace()
                region.trace(resolved.slots.ffn_claim(i), trace)
                metrics.wire_traces[f"attention-{i}"] = trace
        layers = resolved.model.moe_layers
        self._first, self._last_layer = Position(layers[0], 0), layers[-1]
        self._late_us = int(resolved.deployment.ffn.late_ms * 1e3)
        self._free_since = time.monotonic()
        self._stage_every = resolved.deployment.metrics.stage_every
        self._marks: Marks = NoMarks()
        self._began_ns = 0
        self.clock = CallClock()
        self.stopping = False

    def run(self) -> None:
        """Serve until ``stopping`` is set.

        Raises:
            PeerLost, DeadlineExceeded: a rank of this instance is gone or does not keep up; all
                ranks of the instance have to start again.
        """
        try:
            for call in self._source.calls():
                if self.stopping:
                    return
                if call is None:
                    self._steps.forget(self._table.sessions)
                    continue
                self._ranks.tell(call.order)
                if call.order.kind == Kind.STEP:
                    self._run_on_streams(call)
                else:
                    rows = sum(part.rows for part in call.order.parts)
                    self.clock.begin(call.order.position.layer, rows)
                    try:
                        self._run(call)
                    finally:
                        self.clock.end()
        except PeerLost:
            if not self.stopping:  # otherwise everybody goes, in any order
                raise

    def wake(self) -> None:
        """Have the loop look at ``stopping`` and at the membership; any thread."""
        self._region.wake()
        self._ranks.wake()

    def _make_source(self, arrivals: Arrivals) -> Leader | Head | Rank:
        box, hold = self._ranks.box, self._follow_membership
        if box is None:
            return Leader(self._resolved, self._table, arrivals, self._metrics, hold)
        if self._ranks.place.rank:
            return Rank(self._resolved, arrivals, box, hold)
        return Head(self._resolved, self._table, arrivals, box, self._metrics, hold)

    def _follow_membership(self) -> None:
        self._ranks.reconcile()
        self._table.reconcile(self._control.members, self._control.generation)
        self._metrics.peers_up = len(self._table.peers)
        self.moves.follow(self._control.members)

    def _run_on_streams(self, call: Call) -> None:
        """An announced step: the host starts it and watches that it ends."""
        for peer, status in self._steps.run(call, self._late_us):
            # Its stream and ours disagree about the doorbells from here on.
            logger.error("%s is %s in a step; dropped until it restarts", peer.id, status.name)
            self._metrics.late_peers += 1
            self._table.drop(peer)
        self._metrics.steps[call.order.depth] += 1

    def _run(self, call: Call) -> None:
        """One expert call over the rows of all peers, and the answers."""
        position, rows = call.order.position, [part.rows for part in call.order.parts]
        started = time.monotonic()
        if position == self._first:
            self._free_since = started  # idling between steps is no bubble
            self._began_ns = time.monotonic_ns()
            self._marks = new_marks(HostStreams(), sum(self._metrics.steps), self._stage_every)
            self._marks.begin()
        self._marks.working()
        slots = [
            self._resolved.slots.to_ffn(part.attention, position.micro_batch)
            for part in call.order.parts
        ]
        masked = [s for s, sender in zip(slots, call.senders, strict=True) if sender is None]
        if any(rows):
            batch = self._inbox.read(slots, rows, masked)
            self._check_banks(position, batch.ids)
            out = self._model.forward(position.layer, batch.x, batch.ids, batch.weights)
            out, counts = self._shares.of(out, rows)
            answers = Answers.of(out, self._resolved.f2a)
            settle(out.device)  # the host posts them
            self._shares.check()
            self._observe(started, time.monotonic(), sum(rows))
            self._marks.done(position.layer, position.micro_batch, sum(rows))
            self._answer(call, counts, answers)
        else:  # routed dispatch: nobody sent a row that has an expert here
            self._marks.done(position.layer, position.micro_batch, 0)
            self._answer(call, rows, None)
        self._marks.copied()
        self._free_since = time.monotonic()
        if (position.layer, position.micro_batch + 1) == (self._last_layer, call.order.depth):
            self._note_step()
            self._metrics.steps[call.order.depth] += 1

    def _check_banks(self, position: Position, ids: torch.Tensor) -> None:
        """Experts that are not here must not count as zero. The protocol of moves rules that out
        (afd/control/moves.py) as long as the control plane forgets nothing."""
        if ids.device.type == "cpu" and not self._model.holds(position.layer, ids):
            raise PeerLost(
                f"rows of layer {position.layer} ask for experts where they were before a move, or"
                " will be; starting again to hold what the control plane says"
            )

    def _note_step(self) -> None:
        self._marks.end()
        trace = self._marks.read(self._began_ns, replayed=False)
        if trace is not None:
            self._metrics.step_traces.add(trace)
        self._marks = NoMarks()

    def _answer(self, call: Call, counts: Sequence[int], answers: Answers | None) -> None:
        """Each peer's share of the rows; ``counts``: of each part of the call."""
        first = 0
        for sender, rows in zip(call.senders, counts, strict=True):
            if sender is not None:
                assert sender.header is not None
                parts = answers.parts(first, rows) if answers is not None else []
                self._post(sender.peer, sender.header, rows, parts)
            first += rows

    def _post(
        self, peer: Peer, header: Header, rows: int, parts: list[tuple[int, int, int]]
    ) -> None:
        mb = header.micro_batch
        slot = self._resolved.slots.to_attention(self._ranks.place.number, mb)
        status = peer.link.post(
            slot,
            make_flag(peer.session, peer.seq[mb]),
            header.layer,
            mb,
            rows,
            header.depth,
            Kind.DATA,
            self._resolved.f2a.tag,
            header.step,
            parts,
            header,
        )
        self._metrics.wire_bytes[Direction.F2A] += self._resolved.f2a.message_bytes(rows)
        if status != Status.OK:
            logger.warning("answer to %s was not delivered: %s", peer.id, status.name)

    def _observe(self, started: float, done: float, rows: int) -> None:
        metrics = self._metrics
        metrics.stage(Stage.FFN).observe(done - started)
        metrics.bubble_seconds += started - self._free_since
        metrics.rows_per_ffn_call.observe(rows)
