"""2A2F: the same tokens as colocated vLLM, and instances that do not delay each other."""

import os
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from deployments import Host
from helpers import (
    HEALTH_S,
    Running,
    Scrape,
    Stream,
    all_begun,
    answers,
    start_streams,
    tokens_of,
    tokens_when_whole,
    wait_until,
)
from reference import References, same_tokens
from replies import ask_mixed, kinds, mixed, problems

from afd.control import operator
from afd.control.local_keys import operator_keys
from afd.depth import AUTO
from afd_launch.balance import balance
from afd_launch.come_and_go import Operator
from afd_launch.rebalance import Rebalance, rebalance

pytest.importorskip("openai", reason="comes with vLLM; ./run test installs it")
pytestmark = pytest.mark.serve

STEP_WAIT_S, LATE_S = 0.3, 0.5  # as in the deployment "pair"


@pytest.fixture
def deployment(host: Host) -> Running:
    return host.serve("pair")


def test_tokens_are_those_of_colocated_vllm(deployment: Running, references: References) -> None:
    before = deployment.metrics()
    same_tokens(deployment.server, references("qwen3_moe"), "pair")
    after = deployment.metrics()
    for instance in ("attention-0", "attention-1", "ffn-0", "ffn-1"):
        steps = [p.total("afd_steps_total", instance=instance, depth="3") for p in (before, after)]
        assert steps[1] > steps[0], f"{instance} ran no step at depth 3"


def test_experts_move_while_requests_run(deployment: Running) -> None:
    """Experts move to other instances and slots, then to balanced places; the tokens stay equal."""
    control = deployment.server.control
    # Moved experts are summed in another order. No two best tokens of these texts are within 9e-4
    # nats of each other.
    wanted = tokens_when_whole(start_streams(deployment.url, 4, 160, name="moved"), 60)
    streams = start_streams(deployment.url, 4, 160, name="moved")
    all_begun(streams)
    contract = operator.contract(control)
    assert contract is not None
    load = [float(e % 3) for e in range(contract.num_experts)]
    table = balance(load, contract.expert_slots)
    layers = len(contract.moe_layers)
    assert table not in contract.expert_map
    operator.move_experts(control, tables=(table,) * layers)
    wait_until(lambda: not deployment.members().moves_left, 60, "the experts have moved")
    moved = deployment.members()
    assert [move.experts for move in moved.moved] == [table] * layers and not moved.move_fault
    done = [len(stream.tokens) for stream in streams]
    assert rebalance(control, None, Rebalance("greedy")) == 0
    assert tokens_when_whole(streams, 60) == wanted
    assert min(done) < 160, "all requests had ended before the experts moved"


def test_depth_is_chosen_while_requests_run(deployment: Running) -> None:
    """Both instances try every depth, and the tokens stay equal."""
    wanted = tokens_when_whole(start_streams(deployment.url, 8, 100, name="auto"), 60)
    before = deployment.metrics()

    def steps(page: Scrape, instance: int, depth: int) -> float:
        labels = {"instance": f"attention-{instance}", "rows": "4", "depth": str(depth)}
        return sum(page.values("afd_decode_steps_total", **labels))

    def tried_all() -> bool:
        assert tokens_when_whole(start_streams(deployment.url, 8, 100, name="auto"), 60) == wanted
        page = deployment.metrics()
        return all(
            steps(page, i, depth) - steps(before, i, depth) > 5
            for i in range(2)
            for depth in (1, 2, 3)
        )

    operator.set_depth(deployment.server.control, depth=AUTO)
    try:
        wait_until(tried_all, 60, "both instances have run at every depth")
        chosen = deployment.metrics().values("afd_decode_depth", rows="4")
        assert len(chosen) == 2 and chosen[0] == chosen[1]
    finally:
        operator.set_depth(deployment.server.control, depth=None)


def test_answers_through_the_gateway_are_those_of_its_instance(
    deployment: Running, terse: dict[str, float]
) -> None:
    requests = [
        (kind, kind.body(3, stream=stream, length=40))
        for kind in kinds(terse)
        for stream in (False, True)
    ]
    direct = ask_mixed(deployment.member("attention-0").api_url, requests)
    through = ask_mixed(deployment.url, requests)
    assert not [reply.error for reply in direct if reply.error]
    wrong = [
        words
        for (kind, _), one, other in zip(requests, direct, through, strict=True)
        for words in problems(kind, one, other)
    ]
    assert not wrong, "\n".join(wrong)


def test_an_idle_instance_is_not_waited_for(deployment: Running) -> None:
    """attention-1 has worked and is idle now. If steps waited for it, each step of attention-0
    would take step_wait_ms longer."""
    busy, idle = (deployment.member(f"attention-{i}").api_url for i in (0, 1))
    tokens_when_whole([Stream(idle, tokens_of("idle", 9), 8).start()], 60)
    stream = Stream(busy, tokens_of("busy", 9), 40).start()
    tokens_when_whole([stream], 60)
    gaps = [b - a for a, b in zip(stream.times, stream.times[1:], strict=False)]
    assert statistics.median(gaps) < STEP_WAIT_S / 2


@pytest.mark.long
def test_a_stopped_instance_delays_the_other_by_late_ms_and_comes_back(
    deployment: Running,
) -> None:
    member = deployment.member("attention-1")
    group = os.getpgid(member.pid)
    url = deployment.member("attention-0").api_url
    wanted = tokens_when_whole(start_streams(member.api_url, 2, 300, name="stopped"), 60)
    stopped = start_streams(member.api_url, 2, 300, name="stopped")
    free = start_streams(url, 2, 800, name="free")
    all_begun([*stopped, *free])
    os.killpg(group, signal.SIGSTOP)
    try:
        since = time.monotonic()
        wait_until(
            lambda: deployment.members().find("attention", 1) is None,
            20,
            "the control plane removes the silent instance",
        )
        seen = [len(stream.tokens) for stream in stopped]
        # The FFN instances may notice one after the other, and this machine is shared.
        longest = max(stream.longest_gap(since) for stream in free)
        assert longest < 2 * LATE_S + 1.0, f"the other instance was delayed by {longest:.1f} s"
        assert seen == [len(stream.tokens) for stream in stopped]
    finally:
        os.killpg(group, signal.SIGCONT)
    assert tokens_when_whole(stopped, 60) == wanted
    tokens_when_whole(free, 60)
    log = deployment.server.log.read_text(errors="replace")
    assert "attention-1 had been dropped by the control plane and is back" in log
    # afd_late_peers_total is not checked: an instance that stops between two steps is not late
    # in any step (tests/unit/attention/test_remote_loop.py stops one inside a step).


def test_a_killed_attention_instance_loses_nothing(
    deployment: Running, terse: dict[str, float]
) -> None:
    """Its begun answers go on at the other instance, and the client sees no difference."""
    requests = mixed(kinds(terse), 18, 60)
    undisturbed = ask_mixed(deployment.url, requests)
    assert not [reply.error for reply in undisturbed if reply.error]
    wanted = tokens_when_whole(start_streams(deployment.url, 8, 80), 60)
    before = deployment.member("attention-1")
    replays = deployment.total("afd_gateway_replays_total")
    streams = start_streams(deployment.url, 8, 80)
    all_begun(streams)
    assert {stream.instance for stream in streams} == {"attention-0", "attention-1"}
    with ThreadPoolExecutor(1) as pool:
        mix = pool.submit(ask_mixed, deployment.url, requests)
        time.sleep(0.5)
        # Kills the leader of the process group; the supervisor ends the other processes.
        os.kill(os.getpgid(before.pid), signal.SIGKILL)
        assert tokens_when_whole(streams, 60) == wanted
        found = mix.result(90)
    wrong = [
        words
        for (kind, _), one, other in zip(requests, undisturbed, found, strict=True)
        for words in problems(kind, one, other)
    ]
    assert not wrong, "\n".join(wrong)
    assert deployment.total("afd_gateway_replays_total") > replays
    assert answers(f"{deployment.url}/health")
    wait_until(lambda: deployment.is_back(before), HEALTH_S, "attention-1 is back")
    after = deployment.member("attention-1")
    assert after.generation > before.generation
    again = start_streams(deployment.url, 8, 80)
    assert tokens_when_whole(again, 60) == wanted
    assert {stream.instance for stream in again} == {"attention-0", "attention-1"}


def test_an_instance_is_added_drained_and_removed_under_load(deployment: Running) -> None:
    """No stream of those that run meanwhile fails or changes a token."""
    wanted = tokens_when_whole(start_streams(deployment.url, 6, 50, name="elastic"), 60)
    instances = Operator(deployment.server.control, operator_keys(deployment.server.control), 120)
    served: list[Stream] = []

    def keep_serving(act: Callable[[], object]) -> set[str]:
        """Runs ``act`` beside streams; returns the instances of those that began afterwards."""
        before = start_streams(deployment.url, 6, 50, name="elastic")
        all_begun(before)
        act()
        after = start_streams(deployment.url, 6, 50, name="elastic")
        for streams in (before, after):
            assert tokens_when_whole(streams, 60) == wanted
        served.extend(before)
        return {stream.instance for stream in after}

    all_three = {"attention-0", "attention-1", "attention-2"}
    assert keep_serving(lambda: instances.add("attention")) <= all_three
    wait_until(deployment.is_whole, HEALTH_S, "the gateway has found attention-2 healthy")
    assert keep_serving(lambda: instances.drain("attention-0")) <= {"attention-1", "attention-2"}
    instances.drain("attention-0", undo=True)
    assert keep_serving(lambda: instances.remove("attention-2")) <= {"attention-0", "attention-1"}
    assert "attention-2" in {stream.instance for stream in served}
    assert deployment.members().find("attention", 2) is None
    assert deployment.is_whole()


def test_sigterm_lets_requests_finish_and_leaves_nothing(deployment: Running) -> None:
    ports = deployment.ports()
    streams = start_streams(deployment.url, 6, 100)
    all_begun(streams)
    os.kill(deployment.server.pid, signal.SIGTERM)
    tokens_when_whole(streams, 60)
    assert deployment.await_exit(40) == 0
    deployment.await_nothing_left(ports, 5)
