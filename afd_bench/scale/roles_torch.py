"""The roles of `afd bench scale`: an FFN rank that times its leader, and an attention driver.

Both are made from the parts that the servers run: control client, regions and links, the leader,
heads and followers of the pool, the FFN pipeline, the remote experts. Only vLLM is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from afd.config.resolve import Resolved, region_options, resolve
from afd.config.roles import RoleSpec
from afd.control.authority import member_ids
from afd.control.client import ControlClient
from afd.control.connect import client_for, timing_of
from afd.control.keys import CurveKeys
from afd.errors import AfdError
from afd.metrics.role import RoleMetrics
from afd.topology import FfnPlace
from afd_bench.scale.shared import Count, Rows, Tally
from afd_comm import Region, Status
from afd_launch.control_role import run_control
from attention_worker.remote.host import RemoteExperts
from ffn_worker.allreduce.base import Alone
from ffn_worker.call_watchdog import CallClock
from ffn_worker.experts.build import load_ffn_model
from ffn_worker.experts.moves import ExpertMoves
from ffn_worker.host_exchange import HostExchange
from ffn_worker.membership import Membership
from ffn_worker.observers import HostObserver
from ffn_worker.pipeline import Pipeline
from ffn_worker.pool.calls import Call
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.links import PoolLinks
from ffn_worker.pool.peers import PeerTable
from ffn_worker.pool.source import CallSource, make_source
from ffn_worker.rank import FfnRank
from ffn_worker.rank_reduce import RankReduce
from ffn_worker.slots import RankSlots

_PAUSE_S = 0.01


class _TimedRegion(Region):
    """Counts the CPU time of its waits: what a wait costs depends on how busy the machine is."""

    waited_ns = 0

    def wait_all(self, slots: list[int], flags: list[int], timeout_us: int) -> list[Status]:
        began = time.thread_time_ns()
        statuses = super().wait_all(slots, flags, timeout_us)
        self.waited_ns += time.thread_time_ns() - began
        return statuses

    def wait_any(self, slots: list[int], flags: list[int], timeout_us: int) -> int:
        began = time.thread_time_ns()
        first = super().wait_any(slots, flags, timeout_us)
        self.waited_ns += time.thread_time_ns() - began
        return first

    def wait_any_of(
        self, slots: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint64], timeout_us: int
    ) -> int:
        began = time.thread_time_ns()
        first = super().wait_any_of(slots, flags, timeout_us)
        self.waited_ns += time.thread_time_ns() - began
        return first


def control(role: RoleSpec) -> None:
    """Runs the control plane until SIGTERM."""
    assert role.keys_file is not None
    run_control(
        role.control_address,
        CurveKeys.load(role.keys_file),
        members=member_ids(role.deployment),
        timing=timing_of(role),
        contract=resolve(role.deployment).contract,
    )


def ffn(role: RoleSpec, tally: Tally) -> None:
    """Runs one FFN rank until ``tally.stop``; see :func:`ffn_worker.main.run_ffn`."""
    resolved, client, region = _join(role)
    place = FfnPlace(role.index, role.rank, resolved.contract.ffn_instances, 1)
    pool = PoolLinks(resolved, place, client)
    deadline_s = role.deployment.deadlines.start_s
    try:
        client.join(
            addresses=tuple(region.addresses),
            order_addresses=pool.addresses,
            deadline_s=deadline_s,
        )
        model = load_ffn_model(
            role.deployment.model,
            resolved.family,
            resolved.model,
            instances=place.instances,
            index=place.instance,
            placement=resolved.placement,
            shared_by_rows=resolved.shared_by_rows,
            backend=role.deployment.ffn.backend,
        )
        pool.meet(lambda _address: Alone(), deadline_s)
        metrics = RoleMetrics("ffn", max_depth=resolved.contract.max_depth)
        rank = FfnRank(resolved, region, client, model, pool, metrics)
        reduce = RankReduce(pool.collective)
        slots = RankSlots(resolved, region, place.number)
        table = PeerTable(resolved, place.number, region.device)
        late = LatePeers(table, metrics)
        moves = ExpertMoves(resolved, model, client, region.wake)
        follow = Membership(rank, table, moves).follow
        source = make_source(resolved, pool, slots, table, late, follow, lambda: moves.settled)
        client.on_change(lambda _members: region.wake())
        client.set_state("ready")
        tally.add(Count.READY, client.generation)
        with torch.inference_mode():
            Pipeline(model, reduce).run(
                _timed(source, pool, region, tally, resolved.model.moe_layers[-1]),
                HostExchange(slots, reduce, CallClock(), moves),
                HostObserver(resolved, metrics),
            )
        client.leave()
    finally:
        client.close()
        pool.close()
        region.close()


def _timed(
    source: CallSource, pool: PoolLinks, region: _TimedRegion, tally: Tally, last_layer: int
) -> Iterator[Call]:
    """Yields the calls, and passes each on; counts the CPU time of this thread."""
    calls = source.calls()
    while not tally.stop:
        region.waited_ns, began = 0, time.thread_time_ns()
        call = next(calls)
        if call is None:
            continue
        decided = time.thread_time_ns()
        pool.tell(call.order)
        told = time.thread_time_ns()
        tally.add(Count.WAIT_NS, region.waited_ns)
        tally.add(Count.LEADER_NS, told - began - region.waited_ns)
        tally.add(Count.ORDER_NS, told - decided)
        yield call
        tally.add(Count.ANSWER_NS, time.thread_time_ns() - told)
        position = call.position
        if position.layer == last_layer and position.micro_batch + 1 == call.order.depth:
            tally.add(Count.STEPS, 1)


def attention(role: RoleSpec, tally: Tally, layers: Sequence[Rows]) -> None:
    """Runs steps while ``tally.running``, until ``tally.stop``. Checks every answer."""
    resolved, client, region = _join(role)
    client.join(addresses=tuple(region.addresses), deadline_s=role.deployment.deadlines.start_s)
    metrics = RoleMetrics("attention", max_depth=resolved.contract.max_depth)
    remote = RemoteExperts(resolved, role.index, region, client, metrics)
    try:
        remote.connect(role.deployment.deadlines.start_s)
        client.set_state("ready")
        tally.add(Count.READY, client.generation)
        steps = [
            (
                rows.layer,
                torch.from_numpy(rows.x),
                torch.from_numpy(rows.ids),
                torch.from_numpy(rows.weights),
                torch.from_numpy(rows.answer),
            )
            for rows in layers
        ]
        while not tally.stop:
            if not tally.running:
                remote.leave()
                time.sleep(_PAUSE_S)
                continue
            remote.begin_step(1)
            for layer, x, ids, weights, answer in steps:
                remote.send(layer, 0, x, ids, weights)
                if not torch.allclose(remote.recv(0), answer, rtol=1e-4, atol=1e-4):
                    raise AfdError(f"{role.id} got a wrong answer for layer {layer}")
            remote.end_step()
            tally.add(Count.STEPS, 1)
        remote.leave()
        client.leave()
    finally:
        client.close()
        remote.close()


def _join(role: RoleSpec) -> tuple[Resolved, ControlClient, _TimedRegion]:
    """Returns the configuration, a client that has not joined yet, and the receive slots."""
    logging.basicConfig(level=logging.WARNING, format=f"{role.id}: %(message)s")
    torch.set_num_threads(1)
    resolved = resolve(role.deployment)
    slots, layout = (
        (resolved.slots.ffn_region_slots, resolved.a2f)
        if role.role == "ffn"
        else (resolved.slots.attention_region_slots, resolved.f2a)
    )
    options = region_options(role.deployment, "cpu")
    region = _TimedRegion(slots, layout.nbytes, name=role.id, **options)
    region.set_spin_us(0)  # a wait that polls would count as work
    return resolved, client_for(role, resolved.contract), region
