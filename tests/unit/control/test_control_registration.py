"""A member's side of the protocol, with a fake clock, alone and against the real registry."""

from __future__ import annotations

import logging

import pytest
from control_support import CONTRACT, SEAL, FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.control import messages as m
from afd.control.registration import Registration
from afd.control.registry import Registry

TIMING = m.Timing(interval_s=0.5, timeout_s=3.0)


class Member:
    """One registration. Its messages reach a registry or are lost."""

    def __init__(self, clock: FakeClock, role: str, index: int) -> None:
        contract = None if role == "gateway" else CONTRACT
        hello = m.Hello(role, index, contract, pid=1, host="h")
        self.registration = Registration(hello, TIMING, clock)
        self.peer = f"{role}-{index}".encode()

    def speak(self, registry: Registry | None, members: dict[bytes, Member]) -> None:
        message = self.registration.due()
        if message is None or registry is None:
            return
        for out in registry.handle(self.peer, message):
            members[out.peer].registration.handle(out.message)


class World:
    """Three members and a registry, which is None while the server is down."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.wall = FakeClock(1_780_000_000.0)
        self.members = {
            member.peer: member
            for member in (
                Member(self.clock, "attention", 0),
                Member(self.clock, "ffn", 0),
                Member(self.clock, "gateway", 0),
            )
        }
        self.registry: Registry | None = self.new_server()

    def new_server(self) -> Registry:
        return Registry(
            seal=SEAL,
            timing=TIMING,
            clock=self.clock,
            wall_clock=self.wall,
            local_pid_space="elsewhere",
        )

    def run(self, seconds: float, *, lost: frozenset[bytes] = frozenset()) -> None:
        for _ in range(round(seconds / 0.25)):
            self.clock.sleep(0.25)
            self.wall.sleep(0.25)
            for member in self.members.values():
                member.speak(None if member.peer in lost else self.registry, self.members)
                member.registration.check_silence()
            if self.registry is not None:
                for out in self.registry.tick():
                    if out.peer not in lost:
                        self.members[out.peer].registration.handle(out.message)

    def registrations(self) -> list[Registration]:
        return [member.registration for member in self.members.values()]


@pytest.mark.parametrize("lost", [False, True])
def test_a_member_that_renews_gets_a_new_generation_at_once(lost: bool) -> None:
    world = World()
    world.run(1)
    member = world.members[b"attention-0"]
    before = member.registration.generation
    member.registration.renew()
    if lost:
        member.speak(None, world.members)
    world.run(0.5)
    assert world.registry is not None
    registered = world.registry.members.find("attention", 0)
    assert registered is not None and member.registration.joined
    assert registered.generation == member.registration.generation
    assert (member.registration.generation > before) is not lost  # a lost message changes nothing


def test_all_agree_after_joining() -> None:
    world = World()
    world.run(1)
    assert world.registry is not None
    for registration in world.registrations():
        assert registration.joined and registration.generation > 0
        assert registration.members == world.registry.members
    assert len(world.registry.members.members) == 3


def test_state_travels_with_the_next_heartbeat() -> None:
    world = World()
    world.run(1)
    registration = world.registrations()[0]
    registration.set_state("ready")
    assert registration.wait_s() == 0
    world.run(0.25)
    assert world.registrations()[1].members.of("attention", state="ready")
    with pytest.raises(ValueError, match="cannot become starting again"):
        registration.set_state("starting")
    with pytest.raises(ValueError, match="is not one of starting, ready, draining"):
        registration.set_state("asleep")  # type: ignore[arg-type]


def test_silence_is_logged_once_and_keeps_the_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.run(1)
    before = world.registrations()[0].members
    world.registry = None
    with caplog.at_level(logging.INFO):
        world.run(10)
        assert all(x.silent and x.members == before for x in world.registrations())
        assert caplog.text.count("attention-0: the control plane is silent") == 1
        world.registry = world.new_server()
        world.run(1)
    assert caplog.text.count("attention-0: the control plane responds again") == 1
    assert not any(x.silent for x in world.registrations())


def test_generation_grows_when_a_member_was_removed() -> None:
    world = World()
    world.run(1)
    cut_off, other = world.registrations()[:2]
    old = cut_off.generation
    world.run(4, lost=frozenset({b"attention-0"}))
    assert other.members.find("attention", 0) is None
    world.run(1.5)
    assert cut_off.generation > old
    back = other.members.find("attention", 0)
    assert back is not None and back.generation == cut_off.generation


def test_leaving_sends_bye_once_and_only_after_hello() -> None:
    world = World()
    fresh = Member(world.clock, "ffn", 1).registration
    fresh.left = True
    assert fresh.due() is None
    world.run(1)
    registration = world.registrations()[0]
    registration.left = True
    assert registration.due() == m.Bye()
    assert registration.due() is None
    assert not registration.handle(m.Unknown())


def test_refusal_is_final() -> None:
    world = World()
    registration = world.registrations()[0]
    assert registration.handle(m.Refused("no; because"))
    assert registration.refused == "no; because" and not registration.active
    world.clock.sleep(10)
    assert registration.due() is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.25, 1.0, 2.0, 4.0]),
            st.frozensets(st.sampled_from([b"attention-0", b"ffn-0", b"gateway-0"])),
            st.sampled_from(["", "", "crash", "restart"]),
        ),
        max_size=8,
    )
)
def test_all_agree_again_after_any_losses(
    troubles: list[tuple[float, frozenset[bytes], str]],
) -> None:
    world = World()
    generations: dict[str, int] = {}
    for seconds, lost, server in troubles:
        if server == "crash":
            world.registry = None
        elif server == "restart":
            world.registry = world.new_server()
        world.run(seconds, lost=lost)
        for registration in world.registrations():
            assert registration.generation >= generations.get(registration.name, 0)
            generations[registration.name] = registration.generation
    world.registry = world.registry or world.new_server()
    world.run(5)
    for registration in world.registrations():
        assert registration.joined and registration.refused is None
        assert registration.members == world.registry.members
    assert len(world.registry.members.members) == 3
