"""The server's state machine with a fake clock, without sockets or sleeping."""

from __future__ import annotations

import pytest
from control_support import CONTRACT, Deployment, contract_with

from afd.control import messages as m
from afd.control.registry import Outgoing, Registry
from afd.errors import ConfigError


@pytest.fixture
def deployment() -> Deployment:
    return Deployment()


def test_join_gives_a_generation_and_tells_the_others(deployment: Deployment) -> None:
    first = deployment.join(b"a", "attention", 0, addresses=("shm:1",), api_url="http://h:1")
    second = deployment.join(b"f", "ffn", 0)
    assert second.generation > first.generation
    assert deployment.ids == ["attention-0", "ffn-0"]
    told = deployment.inbox[b"a"][-1]
    assert told == deployment.registry.members == second.members
    assert second.members.version == first.members.version + 1
    member = second.members.find("attention", 0)
    assert member is not None
    assert (member.addresses, member.api_url) == (("shm:1",), "http://h:1")
    assert member.state == "starting"


def test_a_repeated_hello_gets_the_same_reply_and_changes_nothing(deployment: Deployment) -> None:
    first = deployment.join(b"a", "attention", 0)
    assert deployment.join(b"a", "attention", 0) == first


def test_members_are_sorted_by_role_and_index(deployment: Deployment) -> None:
    for peer, role, index in ((b"1", "ffn", 1), (b"2", "gateway", 0), (b"3", "ffn", 0)):
        deployment.join(peer, role, index)
    assert deployment.ids == ["ffn-0", "ffn-1", "gateway-0"]


def test_refusal_names_field_values_and_both_members(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    reason = deployment.refuse(b"f", "ffn", 1, contract=contract_with(dtype="float32"))
    assert reason == (
        "ffn-1 refused: dtype is float32 here but bfloat16 on attention-0; "
        "start every role from the same deployment file"
    )
    assert deployment.ids == ["attention-0"]


def test_reference_contract_is_dropped_with_its_last_holder(deployment: Deployment) -> None:
    other = contract_with(dtype="float32")
    deployment.join(b"a", "attention", 0)
    deployment.join(b"f", "ffn", 0)
    deployment.join(b"g", "gateway", 0)
    deployment.registry.handle(b"a", m.Bye())
    assert "bfloat16 on ffn-0" in deployment.refuse(b"x", "attention", 1, contract=other)
    deployment.registry.handle(b"f", m.Bye())
    deployment.join(b"x", "attention", 1, contract=other)


def test_expected_contract_of_the_server_has_priority() -> None:
    deployment = Deployment(expected=CONTRACT)
    reason = deployment.refuse(b"a", "attention", 0, contract=contract_with(hidden=128))
    assert "hidden is 128 here but 64 on the control plane" in reason


@pytest.mark.parametrize(
    ("role", "setting"), [("attention", "attention.max_instances"), ("ffn", "ffn.max_instances")]
)
def test_index_out_of_range_names_both_numbers(
    deployment: Deployment, role: str, setting: str
) -> None:
    reason = deployment.refuse(b"a", role, 2)
    assert f"index 2 is out of range because {setting} is 2" in reason
    assert "from 0 to 1" in reason


@pytest.mark.parametrize(
    ("role", "index", "changes", "part"),
    [
        ("ffn", -1, {}, "negative"),
        ("ffn", 0, {"contract": None}, "no contract"),
        ("router", 0, {}, "no role 'router'"),
        ("ffn", 0, {"protocol": 99}, "install the same version of afd"),
        ("ffn", 0, {"rank": 1}, "rank 1 is out of range because ffn instances have 1"),
    ],
)
def test_other_refusals(
    deployment: Deployment, role: str, index: int, changes: dict[str, object], part: str
) -> None:
    assert part in deployment.refuse(b"a", role, index, **changes)
    assert deployment.ids == []


def test_second_process_is_refused_once_the_first_sends_a_heartbeat(
    deployment: Deployment,
) -> None:
    deployment.join(b"a", "attention", 0, pid=123)
    assert isinstance(deployment.hello(b"b", "attention", 0, pid=124), m.Wait)
    deployment.pass_time(0.5, beating=[b"a"])
    assert deployment.refuse(b"b", "attention", 0, pid=124) == (
        "attention-0 is already running as pid 123 on host h; stop it or use another --index"
    )
    assert deployment.ids == ["attention-0"]


def test_second_process_replaces_a_silent_first_after_the_timeout(deployment: Deployment) -> None:
    old = deployment.join(b"a", "attention", 0, pid_space="elsewhere")
    waited = 0.0
    while isinstance(answer := deployment.hello(b"b", "attention", 0), m.Wait):
        deployment.pass_time(0.5)
        waited += 0.5
        assert waited < 5
    assert isinstance(answer, m.Welcome)
    assert answer.generation > old.generation
    assert waited > 3.0  # not before the timeout


def test_second_process_replaces_a_dead_first_at_once(deployment: Deployment) -> None:
    old = deployment.join(b"a", "ffn", 0, pid=123)
    deployment.join(b"g", "gateway", 0)
    deployment.dead.add(123)
    assert deployment.join(b"b", "ffn", 0, pid=124).generation > old.generation
    assert isinstance(deployment.say(b"a", m.Heartbeat("ready", 0)), m.Unknown)


def test_silent_member_is_removed_and_the_others_are_told(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    deployment.join(b"f", "ffn", 0)
    version = deployment.registry.members.version
    deployment.pass_time(2.75, beating=[b"a"])
    assert deployment.ids == ["attention-0", "ffn-0"]
    deployment.pass_time(0.5, beating=[b"a"])
    assert deployment.ids == ["attention-0"]
    assert deployment.inbox[b"a"][-1] == deployment.registry.members
    assert deployment.registry.members.version == version + 1


def test_dead_process_of_this_host_is_removed_at_the_next_tick(deployment: Deployment) -> None:
    deployment.join(b"f", "ffn", 0, pid=123)
    deployment.join(b"e", "ffn", 1, pid=123, pid_space="another-container")
    deployment.dead.add(123)
    deployment.pass_time(0.25)
    assert deployment.ids == ["ffn-1"]


def test_a_pause_of_the_server_does_not_kill_its_members(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    deployment.pass_time(1.0, beating=[b"a"])
    deployment.clock.sleep(60)  # the server was suspended
    deployment.deliver(deployment.registry.tick())
    assert deployment.ids == ["attention-0"]
    deployment.pass_time(3.5)  # silence after the pause counts
    assert deployment.ids == []


def test_bye_removes_at_once(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    deployment.join(b"f", "ffn", 0)
    deployment.deliver(deployment.registry.handle(b"f", m.Bye()))
    assert deployment.inbox[b"a"][-1] == deployment.registry.members
    assert deployment.ids == ["attention-0"]
    version = deployment.registry.members.version
    assert deployment.registry.handle(b"f", m.Bye()) == [Outgoing(b"f", m.Beat())]
    assert deployment.registry.members.version == version


def test_a_removed_member_returns_with_a_larger_generation(deployment: Deployment) -> None:
    first = deployment.join(b"a", "attention", 0)
    deployment.pass_time(4)
    assert isinstance(deployment.say(b"a", m.Heartbeat("ready", 1)), m.Unknown)
    again = deployment.join(
        b"a", "attention", 0,
        generation=first.generation, incarnation=first.incarnation, known=first.members,
        state="ready",
    )  # fmt: skip
    assert again.generation > first.generation
    member = again.members.find("attention", 0)
    assert member is not None and member.state == "ready"


def test_state_only_moves_forward(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    seen = []
    for state in ("starting", "ready", "starting", "draining", "ready"):
        deployment.beat(b"a", state=state)
        seen.append(deployment.registry.members.members[0].state)
    assert seen == ["starting", "ready", "ready", "draining", "draining"]


def test_heartbeat_with_an_old_version_brings_the_snapshot(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    assert deployment.say(b"a", m.Heartbeat("starting", 0)) == deployment.registry.members
    version = deployment.registry.members.version
    assert deployment.say(b"a", m.Heartbeat("starting", version)) == m.Beat()


# --- operator ---------------------------------------------------------------------------------


def test_operator_depth_is_checked_and_broadcast(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    answer = deployment.say(b"op", m.SetDepth(2))
    assert isinstance(answer, m.Members) and answer.depth == 2
    assert deployment.inbox[b"a"][-1] == answer
    for wrong in (4, -1):
        refusal = deployment.say(b"op", m.SetDepth(wrong))
        assert isinstance(refusal, m.Refused)
        assert str(wrong) in refusal.reason and "from 1 to 3" in refusal.reason
    reset = deployment.say(b"op", m.SetDepth(None))
    assert isinstance(reset, m.Members) and reset.depth is None
    assert deployment.ids == ["attention-0"]  # the operator is not a member


def test_depth_above_a_new_contract_is_reset(deployment: Deployment) -> None:
    deployment.say(b"op", m.SetDepth(3))
    welcome = deployment.join(b"a", "ffn", 0, contract=contract_with(max_depth=2))
    assert welcome.members.depth is None


def test_drain_refuses_newcomers_and_ends_with_the_last_member(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    deployment.join(b"g", "gateway", 0)
    answer = deployment.say(b"op", m.Drain())
    assert isinstance(answer, m.Members) and answer.draining
    assert "draining" in deployment.refuse(b"f", "ffn", 0)
    deployment.registry.handle(b"a", m.Bye())
    assert not deployment.registry.members.draining
    deployment.join(b"f", "ffn", 0)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_role_that_was_a_member_may_return_while_draining(
    deployment: Deployment, noticed: bool
) -> None:
    """Running requests need a crashed FFN instance back; its new process starts at generation 0."""
    deployment.join(b"a", "attention", 0)
    old = deployment.join(b"f", "ffn", 0, pid=123)
    deployment.say(b"op", m.Drain())
    deployment.dead.add(123)
    if noticed:
        deployment.pass_time(0.25, beating=[b"a"])
        assert deployment.ids == ["attention-0"]
    new = deployment.join(b"n", "ffn", 0, pid=124)
    assert new.generation > old.generation and new.members.draining
    assert "draining" in deployment.refuse(b"o", "ffn", 1)


def test_drain_can_be_cancelled(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    deployment.say(b"op", m.Drain())
    deployment.say(b"op", m.Drain(on=False))
    assert not deployment.registry.members.draining


def test_shutdown_notifies_every_member(deployment: Deployment) -> None:
    deployment.join(b"a", "attention", 0)
    assert deployment.say(b"op", m.Shutdown()) == deployment.registry.members
    assert deployment.inbox[b"a"][-1] == m.Closing(stop_members=True)
    assert deployment.registry.stopping


def test_timing_that_would_drop_live_members_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least twice"):
        Registry(timing=m.Timing(interval_s=1.0, timeout_s=1.5), seal=b"")
