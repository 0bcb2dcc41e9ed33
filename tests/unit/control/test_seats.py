"""Instances come and go: which are wanted, who may say so, and who remembers."""

from __future__ import annotations

import pytest
from control_support import (
    CONTRACT,
    KEYS,
    Deployment,
    contract_with,
    control_client,
    control_server,
    eventually,
)

from afd.control import messages as m
from afd.control import operator
from afd.control.authority import OPERATOR, denial
from afd.control.seats import configured, draining
from afd.errors import ConfigError
from afd.placement.tables import spread

OP = b"operator"


@pytest.fixture
def deployment() -> Deployment:
    """Room for two attention instances, of which one is wanted and runs, with one FFN instance."""
    deployment = Deployment(attention=1)
    deployment.join(b"a", "attention", 0, pid=7)
    deployment.join(b"f", "ffn", 0)
    deployment.beat(b"a", state="ready")
    return deployment


def ask(deployment: Deployment, member: str, wish: m.Wish, *, once: bool = False) -> m.FromServer:
    out = deployment.registry.handle(OP, m.SetSeat(member, wish, once))
    return next(sent.message for sent in out if sent.peer == OP)


def wishes(deployment: Deployment, role: str = "attention") -> dict[str, str]:
    seats = deployment.registry.members.seats
    return {seat.id: seat.wish for seat in seats if seat.id.startswith(role)}


def test_an_added_instance_gets_the_first_free_seat(deployment: Deployment) -> None:
    answer = ask(deployment, "attention", "run")
    assert isinstance(answer, m.Members)
    assert wishes(deployment) == {"attention-0": "run", "attention-1": "run"}
    full = ask(deployment, "attention", "run")
    assert isinstance(full, m.Refused) and "all 2 attention instances" in full.reason


def test_a_removed_instance_drains_until_it_is_gone(deployment: Deployment) -> None:
    deployment.join(b"b", "attention", 1)
    deployment.beat(b"b", state="ready")
    second = deployment.registry.members.find("attention", 1)
    assert second is not None
    ask(deployment, "attention-1", "remove")
    assert wishes(deployment) == {"attention-0": "run", "attention-1": "remove"}
    assert draining(deployment.registry.members, "attention-1", second.generation)
    deployment.registry.handle(b"b", m.Bye())
    assert wishes(deployment) == {"attention-0": "run"}


def test_an_instance_that_never_came_is_removed_at_once(deployment: Deployment) -> None:
    ask(deployment, "attention", "run")
    ask(deployment, "attention-1", "remove")
    assert wishes(deployment) == {"attention-0": "run"}


def test_the_last_instance_is_not_removed(deployment: Deployment) -> None:
    answer = ask(deployment, "attention-0", "remove")
    assert isinstance(answer, m.Refused) and "add another one first" in answer.reason


def test_a_restart_ends_with_the_process(deployment: Deployment) -> None:
    old = deployment.registry.members.find("attention", 0)
    assert old is not None
    ask(deployment, "attention-0", "restart")
    assert draining(deployment.registry.members, "attention-0", old.generation)
    deployment.registry.handle(b"a", m.Bye())
    assert wishes(deployment) == {"attention-0": "run"}
    new = deployment.join(b"a2", "attention", 0)
    assert not draining(deployment.registry.members, "attention-0", new.generation)


def test_a_drain_outlives_the_process_until_it_is_undone(deployment: Deployment) -> None:
    ask(deployment, "attention-0", "drain")
    deployment.registry.handle(b"a", m.Bye())
    new = deployment.join(b"a2", "attention", 0)
    assert draining(deployment.registry.members, "attention-0", new.generation)
    ask(deployment, "attention-0", "run")
    assert not draining(deployment.registry.members, "attention-0", new.generation)


def test_a_process_that_got_sigterm_drains_itself_only_once(deployment: Deployment) -> None:
    ask(deployment, "attention-0", "drain", once=True)
    assert wishes(deployment) == {"attention-0": "drain"}
    deployment.dead.add(7)
    deployment.registry.tick()
    assert wishes(deployment) == {"attention-0": "run"}


@pytest.mark.parametrize("wish", ["remove", "restart"])
def test_a_process_that_leaves_by_a_wish_does_not_change_it(
    deployment: Deployment, wish: m.Wish
) -> None:
    """The supervisor sends SIGTERM because of the wish, and the process then drains itself."""
    deployment.join(b"b", "attention", 1)
    ask(deployment, "attention-1", wish)
    before = deployment.registry.members.seat("attention-1")
    ask(deployment, "attention-1", "drain", once=True)
    assert deployment.registry.members.seat("attention-1") == before


def test_a_fixed_ffn_instance_can_only_restart(deployment: Deployment) -> None:
    ask(deployment, "ffn-0", "restart")
    assert wishes(deployment, "ffn") == {"ffn-0": "restart"}
    deployment.registry.handle(b"f", m.Bye())
    assert wishes(deployment, "ffn") == {"ffn-0": "run"}
    for wish in ("remove", "drain"):
        answer = ask(deployment, "ffn-0", wish)
        assert isinstance(answer, m.Refused) and "ffn-0 stays; set ffn.max_inst" in answer.reason


def test_a_single_ffn_rank_has_a_seat_until_it_restarts() -> None:
    deployment = Deployment(expected=contract_with(ffn_tp=2))
    for rank in (0, 1):
        hello = m.Hello("ffn", 0, contract_with(ffn_tp=2), rank=rank)
        deployment.say(b"%d" % rank, hello)
    ask(deployment, "ffn-0.1", "restart")
    assert wishes(deployment, "ffn") == {"ffn-0": "run", "ffn-0.1": "restart"}
    deployment.registry.handle(b"1", m.Bye())
    assert wishes(deployment, "ffn") == {"ffn-0": "run"}


def test_an_ffn_instance_comes_and_goes_and_never_with_experts() -> None:
    """Four experts on ffn-0 and four on ffn-1, with room for a third instance."""
    bounds = (0, 4, 8, 12)
    table = spread(8, bounds, (0, 1), 0)
    contract = contract_with(
        ffn_instances=3, elastic=True, expert_slots=bounds, expert_map=(table,) * 3
    )
    deployment = Deployment(expected=contract, ffn=2)
    for j in (0, 1):
        deployment.say(b"%d" % j, m.Hello("ffn", j, contract))
    assert wishes(deployment, "ffn") == {"ffn-0": "run", "ffn-1": "run"}
    ask(deployment, "ffn", "run")
    assert wishes(deployment, "ffn")["ffn-2"] == "run"
    full = ask(deployment, "ffn", "run")
    assert isinstance(full, m.Refused) and "all 3 FFN instances" in full.reason
    new = (spread(8, bounds, (0, 2), 0),) * 3
    early = deployment.say(OP, m.MoveExperts(new))
    assert isinstance(early, m.Refused) and "ffn-2 is not ready" in early.reason
    deployment.say(b"2", m.Hello("ffn", 2, contract, state="ready"))
    for name, part in (("ffn-0", "ffn-0 leads"), ("ffn-1", "ffn-1 holds experts")):
        answer = ask(deployment, name, "remove")
        assert isinstance(answer, m.Refused) and part in answer.reason
    ask(deployment, "ffn-1", "drain")
    deployment.say(OP, m.MoveExperts(new))
    for number in range(1, 4):
        # ffn-1 gives experts away and ffn-2 gets some: the move needs both of them.
        for peer in (b"0", b"1", b"2"):
            assert not deployment.registry.members.switching
            assert isinstance(ask(deployment, "ffn-1", "remove"), m.Refused)
            deployment.say(peer, m.Heartbeat("ready", 0, number))
        assert deployment.registry.members.switching
        deployment.say(b"0", m.Heartbeat("ready", 0, number))  # there is no attention instance
    assert deployment.registry.members.moves_left == 0
    ask(deployment, "ffn-1", "remove")
    deployment.registry.handle(b"1", m.Bye())
    assert wishes(deployment, "ffn") == {"ffn-0": "run", "ffn-2": "run"}


def test_an_instance_started_by_hand_gets_a_seat(deployment: Deployment) -> None:
    deployment.join(b"b", "attention", 1)
    assert wishes(deployment) == {"attention-0": "run", "attention-1": "run"}


@pytest.mark.parametrize(
    ("member", "wish", "part"),
    [
        ("attention-7", "run", "does not exist with attention.max_instances = 2"),
        ("attention-1", "drain", "attention-1 does not run"),
        ("attention-1", "restart", "attention-1 is not a member"),
        ("ffn-3", "restart", "ffn-3 is not a member"),
        ("gateway-0", "drain", "name an attention or FFN instance"),
        ("attention", "drain", "name an attention or FFN instance"),
        ("attention--1", "run", "name an attention or FFN instance"),
        ("", "run", "name an attention or FFN instance"),
    ],
)
def test_refusals(deployment: Deployment, member: str, wish: m.Wish, part: str) -> None:
    before = deployment.registry.members
    answer = ask(deployment, member, wish)
    assert isinstance(answer, m.Refused) and part in answer.reason
    assert deployment.registry.members == before


def test_a_member_may_only_drain_itself_and_once() -> None:
    own = m.SetSeat("attention-0", "drain", once=True)
    assert denial("attention-0", own, None) is None
    for asked in (
        m.SetSeat("attention-1", "drain", once=True),
        m.SetSeat("attention-0", "drain"),
        m.SetSeat("attention-0", "remove", once=True),
        m.SetSeat("attention", "run"),
    ):
        assert "no operator" in str(denial("attention-0", asked, None))
        assert denial(OPERATOR, asked, None) is None
    assert denial(None, own, None) is not None


def test_a_restarted_control_plane_remembers_the_seats() -> None:
    first = Deployment(attention=2)
    first.join(b"a", "attention", 0)
    first.join(b"f", "ffn", 0)
    ask(first, "attention-1", "remove")
    ask(first, "attention-0", "drain")
    known = first.registry.members
    assert wishes(first) == {"attention-0": "drain"}
    second = Deployment(attention=2)
    member = known.find("ffn", 0)
    assert member is not None
    second.join(
        b"f",
        "ffn",
        0,
        generation=member.generation,
        incarnation=first.registry.incarnation,
        known=known,
    )
    assert wishes(second) == {"attention-0": "drain"}


def test_over_the_wire_with_the_keys_of_each() -> None:
    with control_server(attention=1, contract=CONTRACT) as server:
        client = control_client(server.address, "attention", 0)
        client.join(deadline_s=5)
        try:
            members = operator.set_seat(
                server.address, KEYS.operator, member="attention", wish="run"
            )
            assert members.seats == configured(2, 0)
            own = KEYS.member("attention-0")
            operator.retire(server.address, own, member="attention-0")
            eventually(lambda: client.members.seat("attention-0").wish == "drain", 5)
            with pytest.raises(ConfigError, match="is a member and no operator"):
                operator.set_seat(server.address, own, member="attention-1", wish="remove")
        finally:
            client.close()
