"""The ranks of one attention instance in a step: siblings, which wait for each other.

Each rank sends a share of the rows, and gathers the answers of all ranks before it goes on. So if
the leader served one rank without another, and then waited for the next request of the first, none
would come. Here the leader looks for such a rank while it waits: it serves what the rank has sent,
and takes it into the step.

With one rank per instance nothing here does anything.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping

from afd.config.resolve import Resolved
from afd.schedule import Position
from afd_comm import Status
from ffn_worker.pool.arrivals import Arrivals, OnPause
from ffn_worker.pool.calls import Call, Sender
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.peers import Arrival, Peer, PeerTable

_LOOK_S = 0.01
"""How long the leader waits before it looks for ranks that are behind, seconds."""

InStep = dict[str, Arrival]
"""By peer id, who takes part in a step."""


class Siblings:
    """Keeps the ranks of the attention instances in a step together."""

    def __init__(
        self,
        resolved: Resolved,
        table: PeerTable,
        arrivals: Arrivals,
        late: LatePeers,
        on_pause: OnPause,
    ) -> None:
        self._alone = resolved.contract.attention_tp == 1
        self._micro_batches = range(resolved.contract.max_depth)
        self._table = table
        self._arrivals = arrivals
        self._late = late
        self._on_pause = on_pause

    def absent(self, arrivals: Iterable[Arrival]) -> InStep:
        """Returns the ranks that have not arrived, of the instances that begin a step."""
        if self._alone:
            return {}
        begun = {a.peer.instance: a for a in arrivals}
        here = {a.peer.id for a in arrivals}
        return {
            peer.id: begun[peer.instance]._replace(peer=peer)
            for peer in self._table.peers
            if peer.instance in begun and peer.id not in here
        }

    def without(self, in_step: Mapping[str, Arrival], left: Iterable[Peer]) -> list[Peer]:
        """Returns whom the step goes on without: those that are left out, and their siblings."""
        instances = {peer.instance for peer in left}
        return [a.peer for a in in_step.values() if a.peer.instance in instances]

    def in_time(
        self, in_step: InStep, position: Position, late_s: float
    ) -> Generator[Call, None, float]:
        """Waits until the requests for this position are here, or are late. Meanwhile yields calls
        for the ranks that are behind it, and takes them into the step.

        Returns until when the requests may still come, seconds of the monotonic clock.

        Args:
            late_s: after so many seconds without progress, whoever has not sent is late.
        """
        deadline, waits = time.monotonic() + late_s, True
        while not self._alone:
            self._add(in_step)
            behind = self._behind(in_step, position)
            if behind:
                yield from self._served(behind)
                deadline, waits = time.monotonic() + late_s, True
                continue
            if not waits:
                break
            peers = [a.peer for a in in_step.values() if a.takes_part(position)]
            soon = min(deadline, time.monotonic() + _LOOK_S)
            statuses = self._arrivals.await_messages(
                peers, position.micro_batch, soon, self._on_pause
            )
            waits = Status.DEADLINE in statuses and time.monotonic() < deadline
            if waits:
                self._on_pause()  # a sibling may not have joined here yet
        return deadline

    def _add(self, in_step: InStep) -> None:
        """Takes into the step the siblings of its ranks that have sent a request of it."""
        steps = {a.peer.instance: a.step for a in in_step.values()}
        for peer in self._table.peers:
            if peer.instance in steps and peer.id not in in_step:
                header = self._arrivals.earliest(peer, self._micro_batches)
                if header is not None and header.step == steps[peer.instance]:
                    start = Position(header.layer, header.micro_batch)
                    in_step[peer.id] = Arrival(peer, start, header.depth, header.step)
                    self._table.doorbells.active[peer.index] = True

    def _behind(self, in_step: InStep, position: Position) -> dict[Position, list[Peer]]:
        """Returns the ranks whose next request is for an earlier position, by that. A rank that has
        fewer micro-batches than the step may have begun its next one."""
        found: dict[Position, list[Peer]] = {}
        for arrival in in_step.values():
            header = self._arrivals.earliest(arrival.peer, self._micro_batches)
            if header is not None and header.step == arrival.step:
                at = Position(header.layer, header.micro_batch)
                if at < position:
                    found.setdefault(at, []).append(arrival.peer)
        return found

    def _served(self, behind: Mapping[Position, Iterable[Peer]]) -> Iterator[Call]:
        for position, peers in sorted(behind.items()):
            senders = []
            for peer in peers:
                header = self._arrivals.take(peer, position.micro_batch)
                problem = self._arrivals.problem(header, position)
                if problem is None:
                    senders.append(Sender(peer, header))
                else:
                    self._late.drop_invalid(peer, problem)
            if senders:
                yield Call.of(position, senders)
