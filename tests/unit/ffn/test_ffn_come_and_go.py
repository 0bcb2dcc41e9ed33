"""FFN instances come and go while attention instances run steps."""

from __future__ import annotations

import random
import threading
import time

import msgspec
import pytest
from remote_support import DEPTH, Traffic, in_background, run_step
from test_stream_steps import run_on_streams, stream_of

from afd.control.moves import holding
from afd.metrics.role import Captured
from afd.placement.tables import spread


def use(deployed, *instances):
    """Spreads the experts over these FFN instances, as `afd ctl` does."""
    model, bounds = deployed.resolved.model, deployed.resolved.placement.bounds
    deployed.move((spread(model.num_experts, bounds, instances, 0),) * len(model.moe_layers))


def add(deployed, instance):
    tp = deployed.resolved.contract.ffn_tp
    for rank in range(tp):
        deployed.start_ffn(instance * tp + rank)
    end = time.monotonic() + 10
    while len([m for m in deployed.registry.members.of("ffn", state="ready")
               if m.index == instance]) < tp:  # fmt: skip
        assert time.monotonic() < end, deployed.ended
        time.sleep(0.005)


def remove(deployed, instance):
    tp = deployed.resolved.contract.ffn_tp
    for rank in range(tp):
        deployed.stop_ffn(instance * tp + rank)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("family", "y", "tp", "dispatch", "rounds"),
    [
        ("qwen3_moe", 1, 1, "broadcast", 1),
        pytest.param("deepseek_v3", 1, 1, "routed", 3, marks=LONG),
        pytest.param("deepseek_v3", 2, 1, "broadcast", 3, marks=LONG),
        pytest.param("deepseek_v3", 2, 2, "routed", 3, marks=LONG),
    ],
)
def test_an_instance_is_added_and_removed_under_load(deploy, family, y, tp, dispatch, rounds):
    """The reference checks every answer. The added instance comes again as another process."""
    # If an instance waited for rows that are not sent to it, the test would take this long.
    ffn = {"max_instances": y + 1, "tp": tp, "late_ms": 20_000.0}
    deployed, expected = deploy(family, 2, y, ffn=ffn, wire={"dispatch": dispatch})
    placement, layers = deployed.resolved.placement, deployed.resolved.model.moe_layers
    with Traffic(deployed, expected) as traffic:
        for _ in range(rounds):
            add(deployed, y)
            assert y not in holding(deployed.registry.members, placement, layers)
            use(deployed, *range(y + 1))
            model = deployed.loops[y * tp].rank.model
            before = sum(model.banks.expert_rows()[layers[0]])
            traffic.run_on()
            assert sum(model.banks.expert_rows()[layers[0]]) > before
            use(deployed, *range(y))
            remove(deployed, y)
            traffic.run_on()
    for client in deployed.clients:
        assert not client._sessions._idle
    assert all(loop.rank.metrics.late_peers == 0 for loop in deployed.loops.values())


class Replayed(Traffic):
    """Most steps are announced and run on streams, as replayed graphs are."""

    def run_step(self, deployed, expected, i):
        client, rng = deployed.clients[i], random.Random(f"{i} {self.steps[i]}")
        if rng.random() < 0.2:
            super().run_step(deployed, expected, i)
            return
        depth = rng.randint(1, DEPTH)
        rows, seed = rng.randint(depth, 9), (i, self.steps[i])
        stream = stream_of(deployed, i)
        run_on_streams(client, stream, deployed.resolved, expected, rows, depth, seed)


@pytest.mark.parametrize(
    ("family", "y", "tp", "dispatch", "rounds"),
    [
        ("qwen3_moe", 1, 1, "broadcast", 2),
        ("deepseek_v3", 2, 2, "routed", 1),
        pytest.param("qwen3_moe", 1, 2, "routed", 3, marks=LONG),
        pytest.param("deepseek_v3", 2, 1, "broadcast", 3, marks=LONG),
    ],
)
def test_an_instance_is_added_and_removed_between_replayed_steps(
    deploy, family, y, tp, dispatch, rounds
):
    """Also the first of several instances goes, so that numbers in use are not consecutive."""
    deployed, expected = deploy(
        family, 2, y,
        transport={"backend": "ipc"},
        ffn={"max_instances": y + 1, "tp": tp, "late_ms": 20_000.0},
        wire={"dispatch": dispatch},
    )  # fmt: skip
    layer = deployed.resolved.model.moe_layers[0]
    with Replayed(deployed, expected) as traffic:
        for _ in range(rounds):
            add(deployed, y)
            use(deployed, *range(y + 1))
            model = deployed.loops[y * tp].rank.model
            before = sum(model.banks.expert_rows()[layer])
            traffic.run_on(6)
            assert sum(model.banks.expert_rows()[layer]) > before
            gone = 1 if y > 1 else y
            use(deployed, *(j for j in range(y + 1) if j != gone))
            remove(deployed, gone)
            traffic.run_on(6)
            if gone != y:
                add(deployed, gone)
                use(deployed, *range(y))
                remove(deployed, y)
                traffic.run_on(6)
    assert all(loop.rank.metrics.late_peers == 0 for loop in deployed.loops.values())
    assert not any(
        loop.rank.metrics.graph_captures[Captured.AFTER] for loop in deployed.loops.values()
    )


@LONG
@pytest.mark.parametrize("dispatch", ["broadcast", "routed"])
def test_who_is_idle_or_was_away_follows(deploy, dispatch):
    """attention-1 runs no step while an FFN instance comes and another one goes."""
    deployed, expected = deploy(
        "qwen3_moe", 2, 2, ffn={"max_instances": 3}, wire={"dispatch": dispatch}
    )
    busy, idle = deployed.clients
    deployed.clients = [busy]
    with Traffic(deployed, expected) as traffic:
        run_step(idle, deployed.resolved, expected, [3, 2], "before")
        idle.leave()
        add(deployed, 2)
        use(deployed, 0, 2)
        remove(deployed, 1)
        traffic.run_on()
        run_step(idle, deployed.resolved, expected, [3, 2], "after")
        idle.leave()
        traffic.run_on()
        deployed.renew("attention", 1)  # the control plane had given it up
        add(deployed, 1)
        use(deployed, 0, 1)
        remove(deployed, 2)
        run_step(idle, deployed.resolved, expected, [3, 2], "again")
        traffic.run_on()
    deployed.clients = [busy, idle]
    assert [client._sessions.instances for client in deployed.clients] == [(0, 1)] * 2


@LONG
@pytest.mark.parametrize("dispatch", ["broadcast", "routed"])
def test_a_dropped_attention_instance_resends_its_rows_to_those_that_hold_the_experts(
    deploy, dispatch
):
    """In the middle of its step, while it counts as gone, ffn-2 comes and ffn-1 goes."""
    deployed, expected = deploy(
        "qwen3_moe", 1, 2, ffn={"max_instances": 3}, wire={"dispatch": dispatch}
    )
    client, registry = deployed.clients[0], deployed.registry
    gone = threading.Event()

    def steps():
        for step in range(4):
            run_step(client, deployed.resolved, expected, [3, 2, 1], step, pause=0.05)
            gone.set()

    add(deployed, 2)
    thread, failure = in_background(steps)
    thread.start()
    assert gone.wait(10)
    old = deployed.members.pop("attention-0")
    registry.set(*deployed.members.values())
    use(deployed, 0, 2)
    remove(deployed, 1)
    deployed.generation += 1
    fresh = msgspec.structs.replace(old, generation=deployed.generation)
    deployed.controls["attention-0"].generation = deployed.generation
    deployed.members["attention-0"] = fresh
    registry.set(*deployed.members.values())
    thread.join(20)
    assert not thread.is_alive() and not failure, failure
    assert client._sessions.instances == (0, 2)
