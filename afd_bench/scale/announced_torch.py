"""The leader's time for an announced step, which GPUs replay. No other process takes part.

The loop of the leader runs as in a server, with stand-ins around it. A stand-in for the GPU takes
the place of each replay; meanwhile the stand-ins for attention instances announce the next step.
So the time from the end of one replay to the beginning of the next is all that the leader does:
statuses of the step before, the membership, who takes part, the order and its messages to the
heads, the table of rows, the gate. It contains no wait.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from afd.config.deployment import Deployment
from afd.config.resolve import Resolved, resolve
from afd.control.client import ControlClient
from afd.control.messages import Member, Members
from afd.metrics.role import RoleMetrics
from afd.topology import FfnPlace, session
from afd.wire.layout import Kind
from afd.wire.message import message
from afd_bench.scale.shared import Case, LeaderTime
from afd_comm import Link, Region, Status, make_flag
from ffn_worker.experts.build import load_ffn_model
from ffn_worker.graphs import Step
from ffn_worker.loop import FfnLoop
from ffn_worker.observers import StreamObserver
from ffn_worker.pool.links import PoolLinks
from ffn_worker.pool.orders import OrderInbox
from ffn_worker.rank import FfnRank

DEPTH, ROWS = 3, 24
_GENERATION = 7
_WARM_UP_STEPS = 20


def leader_time(checkpoint: Path, case: Case, steps: int = 1000) -> LeaderTime:
    """Runs the leader of a deployment alone. checkpoint: of the model."""
    resolved = resolve(_deployment(checkpoint, case))
    with contextlib.ExitStack() as open_parts:
        crowd = _Crowd(resolved, open_parts)
        loop = FfnLoop(crowd.rank)
        replay = _Replay(loop, crowd, steps + _WARM_UP_STEPS)
        loop.steps.recorder = replay
        loop.capture_graphs()
        loop.moves.catch_up()
        crowd.announce(1)
        loop.run()
        return LeaderTime.of(replay.took[_WARM_UP_STEPS:])


class _Crowd:
    """The leader's rank among members that announce steps. Nothing else of them exists."""

    def __init__(self, resolved: Resolved, open_parts: contextlib.ExitStack) -> None:
        slots, place = resolved.slots, FfnPlace(0, 0, resolved.contract.ffn_instances, 1)
        self._slots = slots
        region = Region(slots.ffn_region_slots, resolved.a2f.nbytes, name="ffn-0")
        members = []
        for i in range(slots.attention_ranks):
            answers = Region(
                slots.attention_region_slots, resolved.f2a.nbytes, name=f"attention-{i}"
            )
            open_parts.callback(answers.close)
            members.append(Member("attention", i, _GENERATION, addresses=tuple(answers.addresses)))
        members.append(Member("ffn", 0, _GENERATION, addresses=tuple(region.addresses)))
        for j in range(1, place.instances):
            inbox = OrderInbox(resolved, f"ffn-{j}", (0, 0))
            open_parts.callback(inbox.close)
            orders = tuple(inbox.region.addresses)
            members.append(Member("ffn", j, _GENERATION, order_addresses=orders))
        control = cast(ControlClient, _Still(Members(1, tuple(members)), _GENERATION))
        pool = PoolLinks(resolved, place, control)
        open_parts.callback(region.close)
        open_parts.callback(pool.close)
        model = load_ffn_model(
            resolved.deployment.model,
            resolved.family,
            resolved.model,
            instances=place.instances,
            index=0,
            placement=resolved.placement,
            backend="reference",
        )
        metrics = RoleMetrics("ffn", max_depth=resolved.contract.max_depth)
        self.rank = FfnRank(resolved, region, control, model, pool, metrics)
        self._link = Link(region.addresses, timeout_us=1_000_000)
        open_parts.callback(self._link.close)

    def announce(self, number: int) -> None:
        """All attention instances announce their step of this number, from 1."""
        for i in range(self._slots.attention_ranks):
            said = message(
                self._slots.control_to_ffn(i),
                [],
                ROWS,
                layer=-1,
                micro_batch=-1,
                depth=DEPTH,
                kind=Kind.STEP,
                step=number,
            )
            flag = make_flag(session(_GENERATION, _GENERATION), number)
            if self._link.post(said, flag) != Status.OK:
                raise AssertionError(f"the announcement of attention-{i} was not delivered")


@dataclass(frozen=True)
class _Still:
    """A control client whose membership does not change."""

    members: Members
    generation: int

    def report_move(self, number: int, fault: str = "") -> None: ...


class _Replay:
    """Stands in for graphs: see :class:`ffn_worker.graphs.Recorder`.

    took: CPU seconds of the leader before each replay, the first excluded. On a core of its own the
        leader would take as long, because it waits for nothing.
    """

    def __init__(self, loop: FfnLoop, crowd: _Crowd, steps: int) -> None:
        self.took: list[float] = []
        self._loop, self._crowd, self._steps = loop, crowd, steps
        self._number, self._ended = 0, 0.0

    def capture(self, step: Step) -> Step:
        return self._run

    def _run(self) -> StreamObserver:
        began = time.thread_time()
        if self._number:
            self.took.append(began - self._ended)
        self._number += 1
        loop = self._loop
        loop.steps.exchange.gate.cancel()  # as if all were answered
        if self._number > self._steps:
            loop.stopping = True
        self._crowd.announce(self._number + 1)
        observer = loop.steps.reports.observer(loop.steps.exchange.streams)
        self._ended = time.thread_time()
        return observer


def _deployment(checkpoint: Path, case: Case) -> Deployment:
    return Deployment.from_plain(
        {
            "model": str(checkpoint),
            "attention": {
                "instances": case.x,
                "dtype": "float32",
                "max_num_seqs": ROWS,
                "max_num_batched_tokens": ROWS,
            },
            "ffn": {"instances": case.y, "backend": "reference", "threads": 1},
            "pipeline": {"depth": DEPTH, "min_rows": 1},
        }
    )
