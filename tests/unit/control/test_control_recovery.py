"""The registry: server restarts, generations, and arbitrary sequences of events."""

from __future__ import annotations

import pytest
from control_support import NOW_2026, Deployment
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.control import messages as m
from afd.control.generations import MAX_GENERATION, generation_at
from afd.depth import AUTO


def returning(welcome: m.Welcome, known: m.Members) -> dict[str, object]:
    return {
        "generation": welcome.generation,
        "incarnation": welcome.incarnation,
        "known": known,
        "state": "ready",
    }


def test_restarted_server_never_shows_a_smaller_deployment() -> None:
    before = Deployment()
    attention = before.join(b"a", "attention", 0)
    ffn = before.join(b"f", "ffn", 0)
    before.say(b"op", m.SetDepth(2))
    known = before.registry.members

    after = Deployment()
    first = after.join(b"a", "attention", 0, **returning(attention, known))
    assert first.generation == attention.generation
    assert [x.id for x in first.members.members] == ["attention-0", "ffn-0"]
    assert first.members.depth == 2
    assert first.members.version > known.version
    second = after.join(b"f", "ffn", 0, **returning(ffn, known))
    assert second.generation == ffn.generation
    newcomer = after.join(b"n", "ffn", 1)
    assert newcomer.generation > ffn.generation
    after.pass_time(5, beating=[b"a", b"f", b"n"])
    assert after.ids == ["attention-0", "ffn-0", "ffn-1"]


def test_members_that_do_not_return_are_removed_after_the_timeout() -> None:
    before = Deployment()
    attention = before.join(b"a", "attention", 0)
    before.join(b"f", "ffn", 0, pid_space="elsewhere")
    after = Deployment()
    after.join(b"a", "attention", 0, **returning(attention, before.registry.members))
    after.pass_time(2.5, beating=[b"a"])
    assert after.ids == ["attention-0", "ffn-0"]
    after.pass_time(1.0, beating=[b"a"])
    assert after.ids == ["attention-0"]


def test_an_old_snapshot_does_not_restore_removed_members() -> None:
    before = Deployment()
    attention = before.join(b"a", "attention", 0)
    before.join(b"f", "ffn", 0)
    known = before.registry.members
    after = Deployment()
    after.join(b"g", "gateway", 0)
    after.pass_time(10, beating=[b"g"])
    late = after.join(b"a", "attention", 0, **returning(attention, known))
    assert late.generation > attention.generation
    assert after.ids == ["attention-0", "gateway-0"]


def test_members_that_return_late_find_their_deployment() -> None:
    before = Deployment()
    attention = before.join(b"a", "attention", 0)
    before.join(b"f", "ffn", 0)
    before.say(b"op", m.SetDepth(2))
    after = Deployment()
    after.pass_time(10)  # no member could connect before
    back = after.join(b"a", "attention", 0, **returning(attention, before.registry.members))
    assert back.generation == attention.generation
    assert back.members.depth == 2
    assert after.ids == ["attention-0", "ffn-0"]


def test_the_version_never_falls_for_a_member() -> None:
    before = Deployment()
    attention = before.join(b"a", "attention", 0)
    for depth in (1, 2, 3, 1, 2, 3):
        before.say(b"op", m.SetDepth(depth))
    known = before.registry.members
    after = Deployment()
    after.join(b"g", "gateway", 0)
    after.pass_time(10, beating=[b"g"])
    late = after.join(b"a", "attention", 0, **returning(attention, known))
    assert late.members.version > known.version


@pytest.mark.parametrize("wall", [0.0, NOW_2026, 2_270_000_000.0])
def test_generations_fit_32_bits_and_grow_over_restarts(wall: float) -> None:
    before = Deployment(wall=wall)
    old = before.join(b"a", "attention", 0).generation
    after = Deployment(wall=wall + (0.3 if wall else 2e9))
    new = after.join(b"a", "attention", 0).generation
    assert 0 < old < new <= MAX_GENERATION


def test_generation_that_does_not_fit_is_refused() -> None:
    deployment = Deployment(wall=4e9)
    assert generation_at(4e9) > MAX_GENERATION
    assert "clock" in deployment.refuse(b"a", "attention", 0)


# --- any sequence of events -------------------------------------------------------------------

slots = st.sampled_from([("attention", 0), ("attention", 1), ("ffn", 0), ("gateway", 0)])
events = st.one_of(
    st.tuples(st.just("hello"), st.integers(0, 3), slots),
    st.tuples(st.just("beat"), st.integers(0, 3), st.sampled_from(m.STATES)),
    st.tuples(st.just("bye"), st.integers(0, 3), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 4.0]), st.none()),
    st.tuples(st.just("kill"), st.integers(0, 3), st.none()),
    st.tuples(st.just("depth"), st.sampled_from([None, 0, 1, 3, 9]), st.none()),
    st.tuples(st.just("drain"), st.booleans(), st.none()),
)


@settings(max_examples=150)
@given(st.lists(events, max_size=40))
def test_invariants_hold_for_any_sequence(steps: list[tuple[str, object, object]]) -> None:
    deployment = Deployment()
    last = deployment.registry.members
    largest = 0
    for kind, who, what in steps:
        peer = b"peer-%d" % who if isinstance(who, int) else b""
        match kind, what:
            case "hello", (str(role), int(index)):
                answer = deployment.hello(peer, role, index, pid=500 + int(str(who)))
                if isinstance(answer, m.Welcome):
                    member = answer.members.find(role, index)
                    assert member is not None and member.generation == answer.generation
            case "beat", _:
                deployment.deliver(deployment.registry.handle(peer, m.Heartbeat(what, 0)))
            case "bye", _:
                deployment.deliver(deployment.registry.handle(peer, m.Bye()))
            case "wait", _:
                deployment.pass_time(who)
            case "kill", _:
                deployment.dead.add(500 + int(str(who)))
            case "depth", _:
                deployment.say(b"op", m.SetDepth(who))
            case "drain", _:
                deployment.say(b"op", m.Drain(bool(who)))
        now = deployment.registry.members
        assert len(set(deployment.ids)) == len(deployment.ids)
        assert now.version >= last.version
        assert now.version > last.version or now == last
        assert now.depth in (None, AUTO, 1, 3, 9)
        for member in now.members:
            old = last.find(member.role, member.index)
            if old is None or old.generation != member.generation:
                assert member.generation > largest  # each registration gets a larger one
        largest = max([largest, *(x.generation for x in now.members)])
        last = now


@pytest.mark.parametrize("jump_s", [-86_400.0, -5.0, 86_400.0])
def test_a_clock_that_is_set_drops_nobody_and_generations_still_grow(jump_s: float) -> None:
    deployment = Deployment()
    first = deployment.join(b"a", "attention", 0)
    deployment.join(b"f", "ffn", 0)
    deployment.wall.sleep(jump_s)
    deployment.pass_time(5.0, beating=(b"a", b"f"))
    assert deployment.ids == ["attention-0", "ffn-0"]
    deployment.registry.handle(b"a", m.Bye())
    assert deployment.join(b"a2", "attention", 0).generation > first.generation
