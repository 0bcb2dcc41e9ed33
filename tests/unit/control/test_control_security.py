"""Permissions at the control plane, and what strangers and faulty members cannot do."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from control_support import (
    CONTRACT,
    KEYS,
    SEAL,
    Deployment,
    contract_with,
    control_client,
    control_server,
    dealer,
    eventually,
)

from afd.config.deployment import Deployment as Configured
from afd.control import messages as m
from afd.control import operator
from afd.control.authority import OPERATOR, denial, known_keys, member_ids
from afd.control.client import ControlClient
from afd.control.generations import MAX_GENERATION
from afd.control.keys import ClientKeys, CurveKeys, load_client
from afd.control.refusals import Refusals
from afd.control.seal import Seal
from afd.control.server import ControlServer
from afd.errors import ConfigError, HandshakeRefused

MEBI = 2**20


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with control_server() as running:
        yield running


def ask(one: zmq.Socket[bytes], message: m.ToServer) -> m.FromServer | None:
    """Returns the reply, or None if there is none within 1 s."""
    one.send(m.encode(message), zmq.NOBLOCK)
    return m.decode_from_server(one.recv()) if one.poll(1000) else None


def hello(role: str, index: int, **changes: object) -> m.Hello:
    contract = None if role == "gateway" else CONTRACT
    return msgspec.structs.replace(m.Hello(role, index, contract), **changes)


# --- keys and identities ------------------------------------------------------------------------


def test_messages_without_keys_are_ignored(server: ControlServer) -> None:
    with dealer(server.address, None) as stranger:
        for message in (hello("attention", 0), m.Status(), m.Shutdown()):
            with contextlib.suppress(zmq.Again):
                assert ask(stranger, message) is None
    assert server.members == m.Members() and not server.registry.stopping


def test_messages_with_another_deployments_keys_are_ignored(server: ControlServer) -> None:
    other = CurveKeys.generate()
    for own in (other.operator, other.member("attention-0")):
        faked = ClientKeys(KEYS.server_public, own.client_public, own.client_secret)
        with dealer(server.address, faked) as stranger, contextlib.suppress(zmq.Again):
            assert ask(stranger, m.Status()) is None
    assert server.members == m.Members()


def test_a_key_is_valid_for_one_member(server: ControlServer) -> None:
    attention = ControlClient(
        server.address, KEYS.member("attention-0"), role="attention", index=1, contract=CONTRACT
    )
    with pytest.raises(HandshakeRefused, match=r"attention-1 refused: its key is the one of att"):
        attention.join(deadline_s=3)
    with dealer(server.address, KEYS.operator) as one:
        reply = ask(one, hello("gateway", 0))
        assert isinstance(reply, m.Refused) and "the one of operator" in reply.reason
    assert server.members == m.Members()


@pytest.mark.parametrize(
    "message", [m.Status(), m.AskContract(), m.SetDepth(1), m.Drain(), m.Shutdown(),
                m.MoveExperts(((0,),))]
)  # fmt: skip
def test_members_may_not_send_operator_messages(
    server: ControlServer, message: m.FromOperator
) -> None:
    with dealer(server.address, KEYS.member("attention-0")) as one:
        reply = ask(one, message)
        assert isinstance(reply, m.Refused) and "no operator" in reply.reason
    assert server.members == m.Members() and not server.registry.stopping


def test_another_key_cannot_speak_for_a_registered_connection(server: ControlServer) -> None:
    """Even if its holder knows the connection's routing id and so receives its replies."""
    with control_client(server.address, "gateway", 0) as watcher:
        watcher.join(deadline_s=2)
        with dealer(server.address, KEYS.member("attention-0"), b"known") as victim:
            assert isinstance(ask(victim, hello("attention", 0)), m.Welcome)
            with dealer(server.address, KEYS.member("attention-1"), b"known") as thief:
                for message in (m.Bye(), m.Heartbeat("ready", 0)):
                    reply = ask(thief, message)
                    assert isinstance(reply, m.Refused) and "another key" in reply.reason
                member = server.members.find("attention", 0)
                assert member is not None and member.state == "starting"


def test_a_live_member_is_not_displaced_by_a_second_holder_of_its_key(
    server: ControlServer,
) -> None:
    with control_client(server.address, "attention", 0) as first:
        generation = first.join(deadline_s=2)
        second = control_client(server.address, "attention", 0)
        with pytest.raises(HandshakeRefused, match="already running"):
            second.join(deadline_s=5)
        assert first.connected and first.generation == generation


def test_a_member_file_holds_only_its_own_key(tmp_path: Path) -> None:
    KEYS.member("ffn-0").save(tmp_path / "ffn-0.keys")
    for asked in ("ffn-0", "attention-0", None):
        assert load_client(tmp_path / "ffn-0.keys", asked) == KEYS.member("ffn-0")
    with pytest.raises(ConfigError, match="must hold exactly"):
        CurveKeys.load(tmp_path / "ffn-0.keys")


def test_keys_of_members_differ_and_are_reproducible() -> None:
    configured = Configured.from_plain(
        {"model": "m", "attention": {"instances": 2}, "ffn": {"instances": 2, "tp": 2}}
    )
    ids = member_ids(configured)
    assert {"attention-1", "ffn-1.1", "gateway-0"} <= set(ids)
    holders = known_keys(KEYS, ids)
    assert len(holders) == len(ids) + 1 and sorted(holders.values()) == sorted([*ids, OPERATOR])
    assert KEYS.member("ffn-0") == KEYS.member("ffn-0") != CurveKeys.generate().member("ffn-0")


def test_denial_covers_every_message() -> None:
    messages = m.ToServer.__args__
    samples = [hello("ffn", 0), m.Heartbeat("ready", 0), m.Bye(), m.Status(), m.AskContract(),
               m.SetDepth(None), m.Drain(), m.SetSeat("attention-0", "drain"),
               m.MoveExperts(()), m.Shutdown(),
               m.HostReport("a", "p", "m", 1, {}, "{}")]  # fmt: skip
    assert {type(x) for x in samples} == set(messages)
    for sample in samples:
        assert denial(None, sample, None) is not None
        allowed = [who for who in ("ffn-0", "ffn-1", OPERATOR) if not denial(who, sample, "ffn-0")]
        assert allowed == (["ffn-0"] if isinstance(sample, m.FromMember) else [OPERATOR])


def test_the_ranks_of_an_attention_instance_share_its_key() -> None:
    second = hello("attention", 1, rank=1)
    assert denial("attention-1", second, None) is None
    assert denial("attention-1", m.Bye(), "attention-1.1") is None
    for other in ("attention-0", "attention-11", "ffn-1", None):
        assert denial(other, second, None) is not None
        assert denial(other, m.Bye(), "attention-1.1") is not None
    assert denial("ffn-1", hello("ffn", 1, rank=1), None) is not None
    assert denial("ffn-1", m.Bye(), "ffn-1.1") is not None


# --- who learns which addresses -----------------------------------------------------------------


def test_status_has_no_addresses(server: ControlServer) -> None:
    secret = ("shm://region?token=4711",)
    with (
        control_client(server.address, "ffn", 0) as ffn,
        control_client(server.address, "attention", 0) as attention,
        control_client(server.address, "gateway", 0) as gateway,
    ):
        ffn.join(addresses=secret, order_addresses=secret, deadline_s=2)
        attention.join(api_url="http://h:1", deadline_s=2)
        gateway.join(deadline_s=2)
        told = [operator.status(server.address, KEYS.operator)]
        told.append(operator.drain(server.address, KEYS.operator))
        told.append(operator.set_depth(server.address, KEYS.operator, depth=1))
        told.append(operator.shutdown(server.address, KEYS.operator))
        told.append(gateway.members)
        for members in told:
            assert b"4711" not in m.encode(members)
            assert members.find("ffn", 0) is not None
        seen = attention.members.find("ffn", 0)
        assert seen is not None and seen.addresses == seen.order_addresses == secret


def test_a_gateway_that_returns_first_loses_no_addresses() -> None:
    before = Deployment()
    attention = before.join(b"a", "attention", 0, addresses=("a",))
    before.join(b"f", "ffn", 0, addresses=("f",))
    gateway = before.join(b"g", "gateway", 0)
    assert gateway.members.members[0].addresses == ()

    def back(welcome: m.Welcome, known: m.Members) -> dict[str, object]:
        return {"generation": welcome.generation, "incarnation": welcome.incarnation,
                "known": known}  # fmt: skip

    after = Deployment()
    first = after.join(b"g", "gateway", 0, **back(gateway, gateway.members))
    assert [x.id for x in first.members.members] == ["attention-0", "ffn-0", "gateway-0"]
    full = before.registry.members
    second = after.join(b"a", "attention", 0, addresses=("a",), **back(attention, full))
    found = second.members.find("ffn", 0)
    assert second.generation == attention.generation
    assert found is not None and found.addresses == ("f",)


# --- a refusal changes nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": 99},
        {"contract": contract_with(dtype="float32")},
        {"index": 7},
        {"contract": None},
    ],
)
def test_a_refused_hello_changes_nothing(changes: dict[str, object]) -> None:
    deployment = Deployment()
    deployment.join(b"f", "ffn", 0)
    members = deployment.registry.members
    forged = msgspec.structs.replace(
        members,
        version=10**6,
        depth=1,
        draining=True,
        members=(m.Member("ffn", 1, MAX_GENERATION, addresses=("evil",)),),
    )
    forged = Seal(SEAL).put_on(forged)  # even with a valid seal
    refused = {"generation": MAX_GENERATION, "incarnation": 1, "known": forged, **changes}
    message = msgspec.structs.replace(m.Hello("attention", 0, CONTRACT), **refused)
    assert isinstance(deployment.say(b"x", message), m.Refused)
    assert deployment.registry.members == members
    after = deployment.join(b"a", "attention", 0)
    assert after.generation < 2**31 and after.members.version == members.version + 1


def test_a_second_process_that_has_to_wait_changes_nothing() -> None:
    deployment = Deployment()
    deployment.join(b"f", "ffn", 0)
    members = deployment.registry.members
    known = Seal(SEAL).put_on(msgspec.structs.replace(members, version=99, depth=1))
    reply = deployment.hello(b"x", "ffn", 0, generation=9, incarnation=1, known=known)
    assert isinstance(reply, m.Wait) and deployment.registry.members == members


def test_a_claimed_generation_counts_only_with_a_seal() -> None:
    deployment = Deployment()
    usual = deployment.join(b"g", "gateway", 0).generation
    own = m.Member("attention", 0, MAX_GENERATION - 1)
    evil = m.Member("ffn", 0, MAX_GENERATION - 1, addresses=("evil",))
    for seal in (b"", bytes(32), bytes(31)):
        known = m.Members(10**6, (own, evil), depth=1, seal=seal)
        welcome = deployment.join(
            b"a", "attention", 0, generation=MAX_GENERATION - 1, incarnation=1, known=known
        )
        assert usual < welcome.generation < usual + 100
        assert deployment.ids == ["attention-0", "gateway-0"]
        assert deployment.registry.members.depth is None
        deployment.say(b"a", m.Bye())


def test_generations_that_do_not_fit_are_malformed() -> None:
    good = m.encode(hello("ffn", 0, generation=MAX_GENERATION))
    assert m.decode_to_server(good)
    for bad in (MAX_GENERATION + 1, 2**63, -1):
        with pytest.raises(m.Malformed):
            m.decode_to_server(m.encode(hello("ffn", 0, generation=bad)))


def test_a_foreign_contract_does_not_override_the_servers_contract() -> None:
    with control_server(contract=CONTRACT) as server:
        wrong = contract_with(model_hash="f0e1")
        early = control_client(server.address, "ffn", 1, contract=wrong)
        with pytest.raises(HandshakeRefused, match="model_hash is f0e1 here but c0ffee on the con"):
            early.join(deadline_s=3)
        with control_client(server.address, "ffn", 0) as real:
            assert real.join(deadline_s=3) > 0


def test_a_contract_without_the_members_key_is_ignored(server: ControlServer) -> None:
    wrong = hello("ffn", 0, contract=contract_with(model_hash="f0e1"))
    for keys in (None, KEYS.operator, KEYS.member("ffn-1")):
        with dealer(server.address, keys) as stranger, contextlib.suppress(zmq.Again):
            assert not isinstance(ask(stranger, wrong), m.Welcome)
    with control_client(server.address, "ffn", 0) as real:
        assert real.join(deadline_s=3) > 0


# --- floods -------------------------------------------------------------------------------------


def rss() -> int:
    return psutil.Process().memory_info().rss


def test_many_connections_without_keys_cost_little(server: ControlServer) -> None:
    """Raw TCP connections stall in the handshake; ZeroMQ peers queue messages."""
    host, port = server.address.removeprefix("tcp://").split(":")
    with contextlib.ExitStack() as stack:
        member = stack.enter_context(control_client(server.address, "gateway", 0))
        member.join(deadline_s=2)
        before = rss()
        for _ in range(300):
            raw = stack.enter_context(socket.create_connection((host, int(port))))
            raw.setblocking(False)
            with contextlib.suppress(OSError):
                raw.send(b"\xff" + bytes(8) + b"\x7f" + b"x" * 100_000)
        context = stack.enter_context(zmq.Context())
        for _ in range(50):
            one = stack.enter_context(context.socket(zmq.DEALER))
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.SNDHWM, 10)
            one.connect(server.address)
            with contextlib.suppress(zmq.Again):  # the server may have refused it already
                for _ in range(10):
                    one.send(bytes(1000), zmq.NOBLOCK)
        time.sleep(1.0)
        assert member.connected and rss() - before < 40 * MEBI
        started = time.monotonic()
        with control_client(server.address, "ffn", 0) as another:
            another.join(deadline_s=5)
        assert time.monotonic() - started < 5


def test_a_member_that_floods_is_bounded(server: ControlServer) -> None:
    """The member sends large messages faster than they are handled, and reads no replies."""
    with contextlib.ExitStack() as stack:
        watcher = stack.enter_context(control_client(server.address, "gateway", 0))
        watcher.join(deadline_s=2)
        own = KEYS.member("attention-0")
        payload = m.encode(hello("attention", 0)) + bytes(500_000)
        before = rss()
        flooders = [stack.enter_context(dealer(server.address, own)) for _ in range(8)]
        for one in flooders:
            one.setsockopt(zmq.SNDHWM, 1)
        end = time.monotonic() + 2.0
        sent = 0
        while time.monotonic() < end or sent <= 100:
            for one in flooders:
                with contextlib.suppress(zmq.Again):
                    one.send(payload, zmq.NOBLOCK)
                    sent += 1
        # Both ends are in this process. 8 messages of 0.5 MB may wait per connection.
        assert sent > 100 and rss() - before < 200 * MEBI
        eventually(lambda: server.refusals.count > 50, 5)
        assert watcher.connected


def test_a_message_over_the_limit_ends_its_connection(server: ControlServer) -> None:
    with dealer(server.address, KEYS.member("ffn-0")) as one:
        one.send(bytes(m.MAX_MESSAGE_BYTES + 1))
        assert not one.poll(300)
    with control_client(server.address, "ffn", 0) as real:
        assert real.join(deadline_s=3) > 0


def test_refusals_are_counted_and_their_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = Refusals(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.note("refused")
        assert refusals.count == 1000 and len(caplog.records) == 10
        now[0] = 60.0
        refusals.note("refused again")
    assert [r.getMessage() for r in caplog.records[-2:]] == [
        "990 refusals were not logged (1001 in all)",
        "refused again",
    ]


def test_a_heartbeat_costs_little(server: ControlServer) -> None:
    """At 100 us per heartbeat, 100 members with two heartbeats per second use 2 % of a core."""
    deployment = Deployment()
    for index in range(100):
        deployment.join(b"%d" % index, "gateway", index)
    beat = m.encode(m.Heartbeat("starting", deployment.registry.members.version))
    server.registry = deployment.registry
    started = time.perf_counter()
    for _ in range(1000):
        (reply,) = server.replies(b"50", "gateway-50", beat)
    assert isinstance(reply.message, m.Beat)
    assert (time.perf_counter() - started) / 1000 < 100e-6 * 5  # factor 5 for a busy machine
