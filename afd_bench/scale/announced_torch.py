"""The leader's time for an announced step, which GPUs replay. No other process takes part."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from afd.config.deployment import Deployment
from afd.config.resolve import resolve
from afd.metrics.role import RoleMetrics
from afd.topology import FfnPlace
from afd.wire.layout import Kind
from afd.wire.message import message
from afd.wire.streams_torch import HostStreams
from afd_comm import Link, Region, Status, make_flag
from ffn_worker.pool.arrivals import Arrivals
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.leader import Leader
from ffn_worker.pool.peers import Peer, PeerTable
from ffn_worker.slots import RankSlots
from ffn_worker.stream_exchange import StepShape, StreamExchange

DEPTH, ROWS = 3, 24


class Crowd:
    """A leader with members that announce steps; nothing else of them exists."""

    def __init__(self, checkpoint: Path, members: int) -> None:
        self._resolved = r = resolve(
            Deployment.from_plain(
                {
                    "model": str(checkpoint),
                    "attention": {
                        "instances": members,
                        "dtype": "float32",
                        "max_num_seqs": ROWS,
                        "max_num_batched_tokens": ROWS,
                    },
                    "pipeline": {"depth": DEPTH, "min_rows": 1},
                }
            )
        )
        slots, a2f = r.slots, r.a2f.nbytes
        self._region = Region(slots.ffn_region_slots, a2f, name="ffn-0")
        self._link = Link(self._region.addresses, timeout_us=1_000_000)
        mine, table = RankSlots(r, self._region, 0), PeerTable(r, 0, "cpu")
        for i in range(members):
            first = slots.to_ffn(i, 0)
            table._peers[f"attention-{i}"] = Peer(
                f"attention-{i}",
                index=i,
                instance=i,
                generation=1,
                session=7 + i,
                link=self._link,
                slots=tuple(range(first, first + DEPTH + 1)),
                first_flag=make_flag(7 + i, 1),
                seq=[0] * (DEPTH + 1),
                taken=[(-1, -1)] * DEPTH,
                unordered=set(),
            )
        self._peers = table.peers
        late = LatePeers(table, RoleMetrics("ffn"))
        arrivals = Arrivals(r, mine, table, late)
        self._calls = Leader(r, table, arrivals, late, lambda: None, lambda: 0).calls()
        device = torch.device("cpu")
        self._exchange = StreamExchange(
            r, FfnPlace(0, 0, 1, 1), mine, HostStreams(), device, in_order=False
        )
        bucket = ROWS // DEPTH
        self._exchange.allocate([bucket] * DEPTH)
        for peer in self._peers:
            self._exchange.greet(peer)
        self._shape = StepShape(bucket, DEPTH)
        self._plan = self._exchange.plan(self._shape)

    def step(self, number: int) -> float:
        """Seconds from the last announcement of a step to its replay: the order, the table of rows,
        the gate. number: of the step, from 1."""
        for peer in self._peers:
            slot = self._resolved.slots.control_to_ffn(peer.index)
            said = message(
                slot,
                [],
                ROWS,
                layer=-1,
                micro_batch=-1,
                depth=DEPTH,
                kind=Kind.STEP,
                step=number,
            )
            assert self._link.post(said, make_flag(peer.session, number)) == Status.OK
        exchange, table = self._exchange, self._exchange.table
        began = time.perf_counter()
        call = next(self._calls)
        assert call is not None
        call.order.payload()
        table.fill(call.order.parts, [sender is not None for sender in call.senders])
        exchange.gate.begin(self._plan, table.depths, table.answers, 1_000_000)
        took = time.perf_counter() - began
        exchange.gate.cancel()
        assert len(call.order.parts) == len(self._peers)
        assert call.order.bucket == self._shape.bucket
        return took


def leader_us(checkpoint: Path, members: int, steps: int = 400) -> float:
    """Median time of the leader per announced step, us."""
    crowd = Crowd(checkpoint, members)
    times = sorted(crowd.step(number) for number in range(1, steps + 1))
    return 1e6 * times[len(times) // 2]
