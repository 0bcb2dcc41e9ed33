"""Both ends of the wire in one process: RemoteExperts with FfnLoop, without vLLM.

Every answer is compared with the reference experts, computed locally on the same rows.
"""

import threading
import time

import msgspec
import pytest
from fake_verbs import built_fake
from remote_support import (
    DEPTH,
    deploying,
    in_background,
    random_rows,
    reference_model,
    run_step,
)

from afd.errors import CapacityExceeded, DeadlineExceeded
from afd.metrics.role import Stage


@pytest.fixture
def deploy(tiny_models):
    with deploying() as start:
        yield lambda family, x, y, **sections: start(tiny_models(family), x, y, **sections)


@pytest.fixture
def reference(tiny_models):
    return lambda family: reference_model(tiny_models(family))


@pytest.mark.parametrize("x,y", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_every_topology_equals_the_reference(deploy, reference, x, y):
    deployed = deploy("deepseek_v3", x, y)
    expected = reference("deepseek_v3")
    errors = []

    def work(i):
        try:
            for step in range(6):
                sizes = [1 + (i + step + mb) % 5 for mb in range(1 + (step + i) % DEPTH)]
                run_step(deployed.clients[i], deployed.resolved, expected, sizes, (i, step))
            deployed.clients[i].leave()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(x)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    calls = deployed.loops[0].rank.metrics.rows_per_ffn_call.snapshot()
    assert calls.count > 0


def test_rows_of_all_attention_instances_share_one_expert_call(deploy, reference):
    deployed = deploy("qwen3_moe", 2, 1, ffn={"step_wait_ms": 500.0})
    expected = reference("qwen3_moe")
    for step in range(3):
        threads = [
            threading.Thread(
                target=run_step, args=(c, deployed.resolved, expected, [4, 4], (i, step))
            )
            for i, c in enumerate(deployed.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    rows = deployed.loops[0].rank.metrics.rows_per_ffn_call.snapshot()
    layers = len(deployed.resolved.model.moe_layers)
    # The second instance may join after the first step has started; later steps share calls.
    assert rows.total == 3 * 2 * 2 * 4 * layers
    assert rows.count <= (2 + 2 * 2 + 2) * layers


def test_an_idle_instance_does_not_hold_up_the_others(deploy, reference):
    deployed = deploy("qwen3_moe", 2, 1, ffn={"step_wait_ms": 3000.0, "late_ms": 3000.0})
    expected = reference("qwen3_moe")
    busy, idle = deployed.clients
    run_step(idle, deployed.resolved, expected, [2], 1)
    idle.leave()
    started = time.monotonic()
    for step in range(3):
        run_step(busy, deployed.resolved, expected, [2, 2], step)
    assert time.monotonic() - started < 3.0


def test_a_late_instance_is_detached_and_served_separately(deploy, reference):
    deployed = deploy("qwen3_moe", 2, 1, ffn={"step_wait_ms": 100.0, "late_ms": 100.0})
    expected = reference("qwen3_moe")
    slow = threading.Thread(
        target=run_step,
        args=(deployed.clients[0], deployed.resolved, expected, [2, 2], 1),
        kwargs={"pause": 0.3},
    )
    slow.start()
    time.sleep(0.05)
    started = time.monotonic()
    for step in range(5):
        run_step(deployed.clients[1], deployed.resolved, expected, [3], step)
    assert time.monotonic() - started < 2.0
    slow.join(10)
    assert not slow.is_alive()
    assert deployed.loops[0].rank.metrics.late_peers >= 1


def test_an_instance_late_at_one_ffn_is_served_while_another_instance_is_busy(deploy, reference):
    """The leader gets the late instance's rows first. They reach the other FFN instance 0.2 s
    later, while it executes orders for the busy instance."""
    deployed = deploy("qwen3_moe", 2, 2, ffn={"step_wait_ms": 5.0, "late_ms": 5.0})
    expected = reference("qwen3_moe")
    late, busy = deployed.clients
    for client in deployed.clients:  # so that orders for every micro-batch have occurred
        for step in range(3):
            run_step(client, deployed.resolved, expected, [1, 1, 1], step)
    served, steps, post = threading.Event(), [], late._outbox._post

    def one_after_the_other(doorbells, micro_batch, batch):
        late._outbox._post = post
        post([doorbells[0], 0], micro_batch, batch)
        time.sleep(0.2)
        post([0, doorbells[1]], micro_batch, batch)

    def keep_busy():
        end = time.monotonic() + 5.0
        while not served.is_set() and time.monotonic() < end:
            steps.append(run_step(busy, deployed.resolved, expected, [1, 1, 1], len(steps)))

    thread = threading.Thread(target=keep_busy)
    thread.start()
    late._outbox._post = one_after_the_other
    run_step(late, deployed.resolved, expected, [1], 3)
    assert thread.is_alive(), "the late instance was served only after the busy one had ended"
    served.set()
    thread.join(10)


@pytest.mark.parametrize("y", [1, 2])
def test_an_ffn_restart_in_mid_step_loses_nothing(deploy, reference, y):
    deployed = deploy("deepseek_v2", 1, y)
    expected = reference("deepseek_v2")
    client = deployed.clients[0]

    def work():
        for step in range(4):
            run_step(client, deployed.resolved, expected, [2, 3, 1], step, pause=0.05)

    thread, failure = in_background(work)
    thread.start()
    time.sleep(0.4)
    deployed.stop_ffn(y - 1)
    time.sleep(0.3)
    deployed.start_ffn(y - 1)
    thread.join(20)
    assert not thread.is_alive() and not failure, failure
    assert client._observer.metrics.ffn_retries == {"lost": 1, "rejoined": 0}


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_a_member_removed_and_registered_again_continues(deploy, reference, role):
    """The control plane may remove a live process, which then registers with a new generation."""
    deployed = deploy("qwen3_moe", 1, 1)
    expected = reference("qwen3_moe")
    client = deployed.clients[0]
    for step in range(3):
        run_step(client, deployed.resolved, expected, [2, 3], step)
        deployed.renew(role, 0)
    run_step(client, deployed.resolved, expected, [2, 3], 9)
    causes = {"lost": 3 * (role == "ffn"), "rejoined": 3 * (role == "attention")}
    assert client._observer.metrics.ffn_retries == causes


@pytest.mark.parametrize("in_step", [False, True])
def test_an_instance_removed_while_it_waits_for_an_ffn_continues(deploy, reference, in_step):
    """On a busy machine both members may miss heartbeats and register again in turn."""
    deployed = deploy("qwen3_moe", 1, 2, deadlines={"ffn_s": 3.0})
    expected = reference("qwen3_moe")
    client = deployed.clients[0]

    def work():
        for step in range(3):
            run_step(client, deployed.resolved, expected, [2, 3], step, pause=0.03 * in_step)

    thread, failure = in_background(work)
    if in_step:
        thread.start()
        time.sleep(0.1)
    deployed.stop_ffn(1)
    if not in_step:
        thread.start()
    time.sleep(0.3)
    deployed.renew("attention", 0)
    deployed.start_ffn(1)
    thread.join(10)
    assert not thread.is_alive() and not failure, failure


def test_an_ffn_that_dies_again_on_its_return_is_waited_for(deploy, reference):
    deployed = deploy("qwen3_moe", 1, 1)
    expected = reference("qwen3_moe")
    client = deployed.clients[0]
    run_step(client, deployed.resolved, expected, [2], 0)
    dead = deployed.members["ffn-0"]
    deployed.stop_ffn(0)
    # The control plane still shows the new generation as ready, although the process is dead.
    deployed.generation += 1
    deployed.join(msgspec.structs.replace(dead, generation=deployed.generation))
    restart = threading.Timer(0.3, deployed.start_ffn, (0,))
    restart.start()
    run_step(client, deployed.resolved, expected, [2], 1)
    restart.join()


def test_an_ffn_that_never_comes_back_is_an_error_that_names_it(deploy, reference):
    deployed = deploy("qwen3_moe", 1, 1, deadlines={"ffn_s": 0.5})
    client = deployed.clients[0]
    run_step(client, deployed.resolved, reference("qwen3_moe"), [2], 0)
    deployed.stop_ffn(0)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="ffn-0"):
        run_step(client, deployed.resolved, reference("qwen3_moe"), [2], 1)
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_broken_link_between_live_processes_is_reconnected(deploy, reference, way):
    """The network resets a connection. No process dies, so nothing registers again by itself."""
    control = {"heartbeat_s": 0.1, "timeout_s": 0.3}
    deployed = deploy("qwen3_moe", 2, 2, control=control, deadlines={"ffn_s": 3.0})
    expected = reference("qwen3_moe")
    client = deployed.clients[0]
    run_step(client, deployed.resolved, expected, [2, 3], 0)
    ends = client.peers if way == "up" else deployed.loops[1]._table.peers
    ends[-1 if way == "up" else 0].link.close()
    run_step(client, deployed.resolved, expected, [2, 3], 1)
    run_step(deployed.clients[1], deployed.resolved, expected, [2, 3], 1)


def test_an_instance_dropped_by_an_ffn_can_reconnect(deploy, reference):
    """The instance was late in a replayed step but is alive."""
    control = {"heartbeat_s": 0.1, "timeout_s": 0.3}
    deployed = deploy("qwen3_moe", 1, 1, control=control, deadlines={"ffn_s": 3.0})
    client, table = deployed.clients[0], deployed.loops[0]._table
    run_step(client, deployed.resolved, reference("qwen3_moe"), [2], 0)
    before = client.peers
    table.drop(table.peers[0])
    client.reconnect([0])
    assert client.peers[0].session > before[0].session
    run_step(client, deployed.resolved, reference("qwen3_moe"), [2], 1)


def test_the_end_of_an_old_session_does_not_end_its_successor(deploy, reference):
    deployed = deploy("qwen3_moe", 1, 1, deadlines={"ffn_s": 2.0})
    client, table = deployed.clients[0], deployed.loops[0]._table
    run_step(client, deployed.resolved, reference("qwen3_moe"), [2], 0)
    old = table.peers[0]
    deployed.renew("attention", 0)
    run_step(client, deployed.resolved, reference("qwen3_moe"), [2], 1)
    table.drop(old)  # as a wait that outlived its session would do
    time.sleep(0.4)  # long enough for the loop to check its peers again
    run_step(client, deployed.resolved, reference("qwen3_moe"), [2], 2)


class StoppedOnce:
    """A region whose process is stopped for ``stopped_s`` at its first wait."""

    def __init__(self, region, stopped_s):
        self._region = region
        self._stopped_s = stopped_s

    def wait_all(self, slots, flags, timeout_us):
        time.sleep(self._stopped_s)
        self._stopped_s = 0.0
        return self._region.wait_all(slots, flags, timeout_us)

    def __getattr__(self, name):
        return getattr(self._region, name)


def test_time_in_which_an_instance_was_stopped_does_not_count_against_its_ffn(
    deploy, reference, monkeypatch
):
    deployed = deploy("qwen3_moe", 1, 1, deadlines={"ffn_s": 1.0})
    client, model = deployed.clients[0], deployed.loops[0].rank.model
    client._region = StoppedOnce(client._region, 1.3)
    forward = model.forward

    def slow(*args):  # the FFN is stopped too, for longer
        monkeypatch.setattr(model, "forward", forward)
        time.sleep(1.6)
        return forward(*args)

    monkeypatch.setattr(model, "forward", slow)
    run_step(client, deployed.resolved, reference("qwen3_moe"), [2], 0)


def test_more_rows_than_capacity_is_an_error_with_a_remedy(deploy):
    deployed = deploy("qwen3_moe", 1, 1)
    rows = random_rows(deployed.resolved, 65, 0)
    deployed.clients[0].begin_step(1)
    with pytest.raises(CapacityExceeded, match=r"65 rows.*capacity of 64.*max_num_batched_tokens"):
        deployed.clients[0].send(deployed.resolved.model.moe_layers[0], 0, *rows)


@pytest.mark.parametrize(
    ("wire", "bound", "share"),
    [
        ({"format": "fp8"}, 0.05, 1 / 3),
        ({"format": "fp8", "fp8": "e4m3fnuz"}, 0.05, 1 / 3),
        ({"format": "mxfp4"}, 0.25, 1 / 4),
        ({"format": "mxfp4", "fp8": "e4m3fnuz"}, 0.25, 1 / 4),
    ],
)
def test_lossy_wires_are_close_and_small(deploy, reference, wire, bound, share):
    deployed = deploy("qwen3_moe", 1, 2, wire=wire)
    client, resolved = deployed.clients[0], deployed.resolved
    x, ids, weights = random_rows(resolved, 16, 3)
    layer = resolved.model.moe_layers[0]
    client.begin_step(1)
    client.send(layer, 0, x, ids, weights)
    got = client.recv(0)
    want = reference("qwen3_moe").forward(layer, x, ids, weights)
    error = (got - want).norm() / want.norm()
    assert 0 < error < bound
    assert client._observer.metrics.wire_bytes[0] == 2 * resolved.a2f.message_bytes(16)
    assert resolved.a2f.message_bytes(16) < 16 * resolved.model.hidden * 4 * share
    loops = deployed.loops.values()
    sent_back = sum(loop.rank.metrics.wire_bytes[1] for loop in loops)
    assert sent_back == 2 * resolved.f2a.message_bytes(16)


@pytest.mark.parametrize("traced", [True, False])
def test_both_sides_trace_the_wire(deploy, reference, traced):
    deployed = deploy("qwen3_moe", 1, 2, transport={"trace": traced})
    client = deployed.clients[0]
    for step in range(3):
        run_step(client, deployed.resolved, reference("qwen3_moe"), [2, 3], step)
    messages = 3 * 2 * len(deployed.resolved.model.moe_layers)
    sides = {"ffn-0": client._observer.metrics, "attention-0": deployed.loops[0].rank.metrics}
    if not traced:
        assert not any(metrics.wire_traces for metrics in sides.values())
        return
    for peer, metrics in sides.items():
        trace = metrics.wire_traces[peer]
        assert trace.inbound.count >= messages
        # The first message of a micro-batch answers no other.
        assert trace.round_trip.count >= messages - 2
        assert trace.offset_error_ns == 0  # both sides use the same clock
        assert trace.inbound.max_ns < 5e9
    stages = dict(client._observer.metrics.exported_stages())
    assert stages[Stage.F2A].count == 2 * messages  # of both FFN instances


def test_the_loop_over_verbs(deploy, reference, tmp_path):
    with built_fake(tmp_path) as fake:
        verbs = {"ports": ["fake0"], "ffn_ports": ["fake1:1"], "library": fake.library}
        deployed = deploy("qwen3_moe", 2, 2, transport={"backend": "verbs", "verbs": verbs})
        expected = reference("qwen3_moe")
        for step in range(3):
            for i, client in enumerate(deployed.clients):
                assert {ffn.link.backend for ffn in client.peers} == {"verbs"}
                run_step(client, deployed.resolved, expected, [2, 3], (i, step))
                client.leave()
        deployed.close()
        deployed.clients.clear()
