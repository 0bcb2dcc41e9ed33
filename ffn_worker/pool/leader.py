"""The leader decides who takes part in a step, where the step starts, and who is left out.

The FFN is the barrier of a step. A step starts when every active attention instance has arrived, or
after ``ffn.step_wait_ms``. An instance with nothing to do has left and is not waited for. Inside a
step, the leader leaves out an instance that is more than ``ffn.late_ms`` late: the others go on,
and the late one is served alone from its position. The FFN holds no request state, so an attention
instance may also begin in the middle of a step; it does so after a process of the pool restarted.

The ranks of an attention instance wait for each other, because they gather their answers. So they
take part in a step together (:mod:`ffn_worker.pool.siblings`).

A draft layer is a step of its own, of one call (:meth:`afd.models.MoeModel.step_layers`). Instances
that are at the same draft layer share it; others wait for the next step.

The order for a call names the instances that take part, so the other FFN ranks wait for the same
requests. If an attention instance dies in between, a follower may lack the request that rank 0 of
its FFN instance has. It runs the call nevertheless, without a sender for these rows
(:class:`ffn_worker.pool.calls.Call`).
"""

import time
from collections.abc import Iterator

import numpy as np

from afd.config.resolve import Resolved
from afd.graph_sizes import GraphSizes
from afd.schedule import Position, walk
from afd_comm import Status
from ffn_worker.pool.arrivals import SLICE_US, Arrivals, OnPause
from ffn_worker.pool.calls import Call, Sender, Settled, step_order
from ffn_worker.pool.doorbells import Mask
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.peers import Arrival, PeerTable
from ffn_worker.pool.siblings import Siblings

_PAUSE_S = 0.005


class Leader:
    """Decides the calls that every process of the pool runs."""

    def __init__(
        self,
        resolved: Resolved,
        table: PeerTable,
        arrivals: Arrivals,
        late: LatePeers,
        on_pause: OnPause,
        settled: Settled,
    ) -> None:
        ffn = resolved.deployment.ffn
        self._doorbells = table.doorbells
        self._attention_tp = resolved.contract.attention_tp
        self._arrivals = arrivals
        self._late = late
        self._on_pause = on_pause
        self._settled = settled
        self._layers = resolved.model.step_layers
        self._step_wait_s = ffn.step_wait_ms / 1e3
        self._late_s = ffn.late_ms / 1e3
        self._sizes = GraphSizes(resolved.contract.graph_buckets)
        self._siblings = Siblings(resolved, table, arrivals, late, on_pause)

    def calls(self) -> Iterator[Call | None]:
        """See :class:`ffn_worker.pool.source.CallSource`."""
        while True:
            self._on_pause()
            arrivals = self._next_step()
            if arrivals:
                yield from self._host_step(arrivals)
            elif self._doorbells.any_announced:
                yield self._stream_step()
            else:
                yield None

    def _next_step(self) -> list[Arrival]:
        """Waits for messages that begin a step.

        Returns one request per instance that takes part in a step of the host; [] if those who have
        announced a step begin it, or if nothing came for a while.
        """
        doorbells, source = self._doorbells, self._arrivals
        source.read_controls()
        if not doorbells.any_announced:
            if not source.wait_for_any(doorbells.joined, SLICE_US):
                time.sleep(_PAUSE_S)  # without live peers the wait returns at once
                return []
            source.read_controls()
        deadline = time.monotonic() + self._step_wait_s
        arrived: list[Arrival] = []
        here = np.zeros_like(doorbells.joined)
        while not doorbells.all_announced:  # else nobody is awaited
            new = source.pending(~here)
            arrived += new
            here[[a.peer.index for a in new]] = True
            resumed = [a for a in new if a.start not in source.beginnings]
            if resumed:  # it begins in the middle of a step, so no other instance can join it
                return [a for a in arrived if a.peer.instance == resumed[0].peer.instance]
            here |= doorbells.announced
            awaited = self._awaited(here)
            left_us = int((deadline - time.monotonic()) * 1e6)
            if not awaited.any() or left_us <= 0 or not source.wait_for_any(awaited, left_us):
                break
            source.read_controls()
        # A graph cannot wait for messages that the host posts. So either all instances of a step
        # have announced it, or none has.
        if doorbells.any_announced:
            return []
        arrived.sort(key=lambda a: a.peer.index)
        # Draft layers have the highest numbers: their instances come first, and catch up.
        start = max((a.start for a in arrived), default=source.first)
        return [a for a in arrived if a.start == start]

    def _awaited(self, here: Mask) -> Mask:
        """Returns who is waited for once these have arrived."""
        if not here.any():
            return here
        doorbells, tp = self._doorbells, self._attention_tp
        begun = here.reshape(-1, tp).any(axis=1).repeat(tp)  # another rank of the instance is here
        awaited: Mask = doorbells.joined & ~here & (doorbells.active | begun)
        return awaited

    def _stream_step(self) -> Call:
        """Returns the call for the steps that were announced."""
        parts = self._doorbells.take_announced()
        order = step_order(self._arrivals.first, parts, self._sizes, self._settled())
        return Call(order, self._arrivals.senders_of(parts))

    def _host_step(self, arrivals: list[Arrival]) -> Iterator[Call]:
        """Yields all expert calls of one step, in the order in which attention posts them. A call
        is formed when its requests are here, so an instance may drop out between two calls."""
        start = min(a.start for a in arrivals)
        in_step = {a.peer.id: a for a in arrivals}
        if start in self._arrivals.beginnings:
            in_step |= self._siblings.absent(arrivals)
        active = self._doorbells.active
        active[[a.peer.index for a in in_step.values()]] = True
        depth = max(a.depth for a in arrivals)
        layers = self._layers if start.layer <= self._layers[-1] else (start.layer,)
        for position in walk(layers, depth, start=start):
            deadline = yield from self._siblings.in_time(in_step, position, self._late_s)
            taking_part = [a for a in in_step.values() if a.takes_part(position)]
            senders = self._take(taking_part, position, deadline)
            if len(senders) < len(taking_part):
                here = {sender.peer.id for sender in senders}
                left = [a.peer for a in taking_part if a.peer.id not in here]
                for peer in self._siblings.without(in_step, left):
                    active[peer.index] = False  # the next step does not wait for it
                    del in_step[peer.id]
            if senders:
                yield Call.of(position, senders)
            elif not in_step:
                return

    def _take(self, arrivals: list[Arrival], position: Position, deadline: float) -> list[Sender]:
        """Waits for the requests for this position. Returns their senders, without the instances
        that are late or gone, or sent an invalid message."""
        if not arrivals:
            return []
        peers, mb = [a.peer for a in arrivals], position.micro_batch
        statuses = self._arrivals.await_messages(peers, mb, deadline, self._on_pause)
        senders = []
        for peer, status in zip(peers, statuses, strict=True):
            if status != Status.OK:
                self._late.leave_out(peer, status, position)
                continue
            header = self._arrivals.take(peer, mb)
            problem = self._arrivals.problem(header, position)
            if problem is not None:
                self._late.drop_invalid(peer, problem)
                continue
            senders.append(Sender(peer, header))
        return senders
