"""The loop of an FFN instance: the mirror image of the attention side's layer pipeline.

The FFN is the barrier of a step (design: steps, membership, failure). A step starts when every
active attention instance has arrived or ``step_wait`` has passed; an instance with nothing to do
has left the epoch and is not waited for. Inside a step, an instance that is later than ``late`` is
detached: the others go on, and it is served on its own from where it stands. Since no request state
lives here, an attention instance may also begin in mid-step, which is what it does after this
process was restarted.
"""

import logging
import time
from collections.abc import Sequence

from afd.control.client import ControlClient
from afd.metrics import Direction, RoleMetrics, Stage
from afd.resolve import Resolved
from afd.schedule import Position, walk
from afd.step_trace import Marks, NoMarks, new_marks
from afd.wire.layout import Kind
from afd.wire.streams_torch import HostStreams, make_streams, settle
from afd_comm import Header, PeerTrace, Region, Status, make_flag
from ffn_worker.answers import Answers
from ffn_worker.inbox import Inbox
from ffn_worker.model import FfnModel
from ffn_worker.peers import Announced, Arrival, Peer, PeerTable
from ffn_worker.steps import StreamSteps

logger = logging.getLogger("afd.ffn")

_IDLE_US = 200_000
"""How long one idle wait lasts before membership and shutdown are looked at, microseconds."""
_PAUSE_S = 0.005


class FfnLoop:
    """Serves every attention instance of the deployment from one thread."""

    def __init__(
        self,
        resolved: Resolved,
        index: int,
        region: Region,
        control: ControlClient,
        model: FfnModel,
        metrics: RoleMetrics,
    ) -> None:
        self._resolved = resolved
        self._region = region
        self._control = control
        self._model = model
        self._metrics = metrics
        self._inbox = Inbox(region, resolved)
        self._table = PeerTable(resolved, index, region.device)
        streams = make_streams(model.device)
        self._steps = StreamSteps(
            resolved, region, self._inbox, self._table, model, streams, metrics
        )
        self._stage_every = resolved.deployment.metrics.stage_every
        self._marks: Marks = NoMarks()
        if resolved.deployment.transport.trace:
            for i in range(resolved.deployment.attention.instances):
                trace = PeerTrace()
                region.trace(resolved.slots.ffn_claim(i), trace)
                metrics.wire_traces[f"attention-{i}"] = trace
        self._layers = resolved.model.moe_layers
        self._max_depth = resolved.contract.max_depth
        self._step_wait_s = resolved.deployment.ffn.step_wait_ms / 1e3
        self._late_us = int(resolved.deployment.ffn.late_ms * 1e3)
        self._free_since = time.monotonic()
        self.stopping = False

    def run(self) -> None:
        """Serve until ``stopping`` is set."""
        while not self.stopping:
            self._table.reconcile(self._control.members, self._control.generation)
            self._metrics.peers_up = len(self._table.peers)
            arrivals = self._next_step()
            if not arrivals:
                self._steps.forget(self._table.sessions)
            elif arrivals[0].rows:
                self._run_on_streams(arrivals)
            else:
                self._run_step(arrivals)

    def _next_step(self) -> list[Arrival]:
        """Instances that take part in the next step; empty when nothing came for a while."""
        peers = self._table.peers
        if not any(p.announced for p in peers) and not self._wait_for_any(peers, _IDLE_US):
            time.sleep(_PAUSE_S)  # without live peers the wait returns at once
            return []
        arrived = self._arrivals(peers)
        resumed = [a for a in arrived if a.start != self._first]
        if resumed:
            return resumed[:1]
        deadline = time.monotonic() + self._step_wait_s
        while arrived:
            here = {a.peer.id for a in arrived}
            awaited = [p for p in peers if p.active and p.id not in here]
            left_us = int((deadline - time.monotonic()) * 1e6)
            if not awaited or left_us <= 0 or not self._wait_for_any(awaited, left_us):
                break
            arrived = [a for a in self._arrivals(peers) if a.start == self._first]
        # A graph cannot wait for messages of the host, so a step has arrivals of one kind.
        return [a for a in arrived if a.rows] or arrived

    @property
    def _first(self) -> Position:
        return Position(self._layers[0], 0)

    def _wait_for_any(self, peers: Sequence[Peer], timeout_us: int) -> bool:
        pairs = [(p, mb) for p in peers for mb in range(self._max_depth + 1)]
        slots = [self._table.slot(p, mb) for p, mb in pairs]
        flags = [self._table.next_flag(p, mb) for p, mb in pairs]
        # The control slot may show its second next message already: see _read_control.
        slots += [self._table.slot(p, self._max_depth) for p in peers]
        flags += [self._table.next_flag(p, self._max_depth, ahead=2) for p in peers]
        return self._region.wait_any(slots, flags, timeout_us) >= 0

    def _arrivals(self, peers: Sequence[Peer]) -> list[Arrival]:
        """What has arrived and was not taken yet: each peer's earliest message. Takes leaves and
        announcements."""
        arrivals = []
        for peer in peers:
            self._read_control(peer)
            if peer.announced is not None:
                step = peer.announced
                arrivals.append(Arrival(peer, self._first, step.depth, step.rows))
                continue
            heads = [
                self._region.header(self._table.slot(peer, mb))
                for mb in range(self._max_depth)
                if self._region.ready(self._table.slot(peer, mb), self._table.next_flag(peer, mb))
            ]
            if heads:
                first = min(heads, key=lambda h: (h.layer, h.micro_batch))
                start = Position(first.layer, first.micro_batch)
                arrivals.append(Arrival(peer, start, first.depth))
        return arrivals

    def _read_control(self, peer: Peer) -> None:
        """Take what the peer said on its control slot.

        An announcement may overwrite a leave that nobody has read yet, and nothing else is ever
        overwritten: after an announcement the peer waits for the step. So of two the second counts.
        """
        mb = self._max_depth
        slot = self._table.slot(peer, mb)
        for ahead in (1, 2):
            flag = self._table.next_flag(peer, mb, ahead)
            if not self._region.ready(slot, flag):
                continue
            header = self._region.header(slot)
            if not self._region.ready(slot, flag):
                continue  # overwritten while it was read
            peer.seq[mb] += ahead
            peer.active = header.kind == Kind.STEP
            if header.kind == Kind.STEP:
                problem = self._inbox.problem_of_step(header, self._max_depth)
                if problem is not None:
                    logger.error("%s announced %s; dropped until it restarts", peer.id, problem)
                    self._table.drop(peer)
                    return
                peer.announced = Announced(header.rows, header.depth)
            return

    def _run_on_streams(self, arrivals: list[Arrival]) -> None:
        """An announced step: the host starts it and watches that it ends."""
        for arrival in arrivals:
            arrival.peer.active = True
            arrival.peer.announced = None
        for peer, status in self._steps.run(arrivals, self._late_us):
            # Its stream and ours disagree about the doorbells from here on.
            logger.error("%s is %s in a step; dropped until it restarts", peer.id, status.name)
            self._metrics.late_peers += 1
            self._table.drop(peer)
        self._metrics.steps[max(a.depth for a in arrivals)] += 1

    def _run_step(self, arrivals: list[Arrival]) -> None:
        """All expert calls of one step, in the order in which the attention side posts them."""
        members = {a.peer.id: a for a in arrivals}
        for arrival in arrivals:
            arrival.peer.active = True
        self._free_since = time.monotonic()  # idling between steps is no bubble
        began_ns = time.monotonic_ns()
        self._marks = new_marks(HostStreams(), sum(self._metrics.steps), self._stage_every)
        self._marks.begin()
        depth = max(a.depth for a in arrivals)
        for position in walk(self._layers, depth, start=arrivals[0].start):
            taking_part = [a.peer for a in members.values() if position.micro_batch < a.depth]
            if not taking_part:
                if not members:
                    return
                continue
            peers, headers = self._take(taking_part, position)
            self._marks.working()
            for peer in taking_part:
                if peer not in peers:
                    del members[peer.id]
            if peers:
                self._call(position, peers, headers)
        self._marks.end()
        trace = self._marks.read(began_ns, replayed=False)
        if trace is not None:
            self._metrics.step_traces.add(trace)
        self._metrics.steps[depth] += 1

    def _take(self, peers: list[Peer], position: Position) -> tuple[list[Peer], list[Header]]:
        """Wait for this position's message of every peer; leave out who is late, gone or wrong."""
        mb = position.micro_batch
        slots = [self._table.slot(p, mb) for p in peers]
        flags = [self._table.next_flag(p, mb) for p in peers]
        statuses = self._region.wait_all(slots, flags, self._late_us)
        here, headers = [], []
        for peer, slot, status in zip(peers, slots, statuses, strict=True):
            if status != Status.OK:
                logger.warning(
                    "%s is %s at %s; going on without it", peer.id, status.name, position
                )
                self._metrics.late_peers += 1
                peer.active = False
                continue
            header = self._region.header(slot)
            peer.seq[mb] += 1
            problem = self._inbox.problem(header)
            if problem is None and (header.kind, header.layer) != (Kind.DATA, position.layer):
                problem = f"layer {header.layer} where layer {position.layer} was due"
            if problem is not None:
                logger.error("%s sent %s; dropped until it restarts", peer.id, problem)
                self._table.drop(peer)
                continue
            here.append(peer)
            headers.append(header)
        return here, headers

    def _call(self, position: Position, peers: list[Peer], headers: list[Header]) -> None:
        """One expert call over the rows of all peers, and the answers."""
        started = time.monotonic()
        rows = [h.rows for h in headers]
        slots = [self._table.slot(p, position.micro_batch) for p in peers]
        batch = self._inbox.read(slots, rows)
        out = self._model.forward(position.layer, batch.x, batch.ids, batch.weights)
        answers = Answers.of(out, self._resolved.f2a)
        settle(out.device)  # the host posts them
        done = time.monotonic()
        self._observe(started, done, sum(rows))
        self._marks.done(position.layer, position.micro_batch, sum(rows))
        offset = 0
        for peer, header in zip(peers, headers, strict=True):
            self._answer(peer, position, header, answers.parts(offset, header.rows))
            offset += header.rows
        self._marks.copied()
        self._free_since = time.monotonic()

    def _answer(
        self, peer: Peer, position: Position, header: Header, parts: list[tuple[int, int, int]]
    ) -> None:
        mb = position.micro_batch
        slot = self._resolved.slots.to_attention(self._model.index, mb)
        flag = make_flag(peer.session, peer.seq[mb])
        status = peer.link.post(
            slot,
            flag,
            position.layer,
            mb,
            header.rows,
            header.depth,
            Kind.DATA,
            self._resolved.f2a.tag,
            header.step,
            parts,
            header,
        )
        self._metrics.wire_bytes[Direction.F2A] += self._resolved.f2a.message_bytes(header.rows)
        if status != Status.OK:
            logger.warning("answer to %s was not delivered: %s", peer.id, status.name)

    def _observe(self, started: float, done: float, rows: int) -> None:
        metrics = self._metrics
        metrics.stage(Stage.FFN).observe(done - started)
        metrics.bubble_seconds += started - self._free_since
        metrics.rows_per_ffn_call.observe(rows)
