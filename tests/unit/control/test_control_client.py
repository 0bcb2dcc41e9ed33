"""Client and server over loopback sockets: joining, changes, operator, keys, deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from control_support import (
    CONTRACT,
    FAST,
    KEYS,
    contract_with,
    control_client,
    control_server,
    eventually,
)

from afd.config.contract import Contract
from afd.control import operator
from afd.control.client import ControlClient
from afd.control.keys import CurveKeys
from afd.control.messages import Members
from afd.control.server import ControlServer
from afd.errors import AfdError, ConfigError, DeadlineExceeded, HandshakeRefused, PeerLost

MakeClient = Callable[..., ControlClient]


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with control_server() as running:
        yield running


@pytest.fixture
def make_client(server: ControlServer) -> Iterator[MakeClient]:
    clients: list[ControlClient] = []

    def make(
        role: str = "attention",
        index: int = 0,
        *,
        contract: Contract | None = CONTRACT,
        keys: CurveKeys = KEYS,
        address: str | None = None,
    ) -> ControlClient:
        client = control_client(
            address or server.address, role, index, keys,
            contract=None if role == "gateway" else contract,
        )  # fmt: skip
        clients.append(client)
        return client

    yield make
    for client in clients:
        start = time.monotonic()
        client.close()
        assert time.monotonic() - start < 2


def test_members_see_each_other(make_client: MakeClient) -> None:
    attention, ffn, gateway = make_client(), make_client("ffn"), make_client("gateway")
    first = attention.join(addresses=["shm:1"], api_url="http://h:1", deadline_s=2)
    assert attention.generation == first
    assert ffn.join(addresses=("shm:2", "tcp:2"), metrics_url="http://m", deadline_s=2) > first
    gateway.join(deadline_s=2)
    ffn.set_state("ready")
    for client in (attention, ffn, gateway):
        members = client.wait_for(
            lambda x: len(x.of("ffn", state="ready")) == 1 and len(x.members) == 3,
            deadline_s=2,
            what="ffn-0",
        )
        assert client.connected
        seen = members.find("ffn", 0)
        assert seen is not None
        # Addresses contain access tokens, so a gateway does not get them.
        addresses = () if client is gateway else ("shm:2", "tcp:2")
        assert (seen.addresses, seen.metrics_url) == (addresses, "http://m")
    with pytest.raises(ValueError, match="cannot become starting"):
        ffn.set_state("starting")


def test_leaving_is_seen_at_once(make_client: MakeClient) -> None:
    attention, ffn = make_client(), make_client("ffn")
    attention.join(deadline_s=2)
    ffn.join(deadline_s=2)
    attention.wait_for(lambda x: x.find("ffn", 0) is not None, deadline_s=2, what="ffn-0")
    ffn.leave()
    ffn.leave()
    assert eventually(lambda: attention.members.find("ffn", 0) is None, 2) < FAST.timeout_s
    assert ffn.members.find("attention", 0) is not None  # the client keeps its last snapshot
    ffn.close()
    ffn.close()
    ffn.join(deadline_s=2)  # a closed client may join again
    assert attention.wait_for(lambda x: len(x.of("ffn")) == 1, deadline_s=2, what="ffn-0")


def test_refusals(make_client: MakeClient) -> None:
    make_client().join(deadline_s=2)
    with pytest.raises(HandshakeRefused, match=r"ffn-1 refused: dtype is float32 here but bfl"):
        make_client("ffn", 1, contract=contract_with(dtype="float32")).join(deadline_s=2)
    with pytest.raises(HandshakeRefused, match=r"ffn\.max_instances is 2"):
        make_client("ffn", 2).join(deadline_s=2)
    start = time.monotonic()
    with pytest.raises(HandshakeRefused, match="attention-0 is already running as pid"):
        make_client().join(deadline_s=5)
    assert time.monotonic() - start < 4  # refused before the deadline


def test_on_change_gets_every_snapshot_in_order_and_may_raise(make_client: MakeClient) -> None:
    client, other = make_client(), make_client("ffn")
    seen: list[Members] = []
    threads: set[threading.Thread] = set()

    def record(members: Members) -> None:
        seen.append(members)
        threads.add(threading.current_thread())
        with pytest.raises(RuntimeError, match="wait for itself"):
            client.wait_for(lambda _: True, deadline_s=1, what="nothing")
        raise ValueError("an error in the role's callback")

    client.on_change(record)
    client.join(deadline_s=2)
    other.join(deadline_s=2)
    eventually(lambda: seen and len(seen[-1].members) == 2, 5)
    other.close()
    eventually(lambda: len(seen[-1].members) == 1, 5)
    assert [x.version for x in seen] == sorted({x.version for x in seen})
    assert threads and threading.current_thread() not in threads
    assert client.connected


def test_operator(server: ControlServer, make_client: MakeClient) -> None:
    client = make_client()
    changes: list[tuple[int | None, bool]] = []
    client.on_change(lambda x: changes.append((x.depth, x.draining)))
    client.join(deadline_s=2)
    assert [x.id for x in operator.status(server.address, KEYS.operator).members] == ["attention-0"]
    assert operator.set_depth(server.address, KEYS.operator, depth=2).depth == 2
    with pytest.raises(ConfigError, match="depth 9 refused: it must be from 1 to 3"):
        operator.set_depth(server.address, KEYS.operator, depth=9)
    eventually(lambda: client.depth == 2 and not client.draining, 2)
    assert operator.drain(server.address, KEYS.operator).draining
    eventually(lambda: client.draining and (2, True) in changes, 2)
    assert not operator.drain(server.address, KEYS.operator, on=False).draining
    eventually(lambda: not client.draining, 2)
    operator.shutdown(server.address, KEYS.operator)
    with pytest.raises(PeerLost, match="operator ended the deployment"):
        client.wait_for(lambda _: False, deadline_s=5, what="anything")
    assert client.stopping


def test_wait_for_names_what_is_awaited(make_client: MakeClient) -> None:
    client = make_client()
    with pytest.raises(PeerLost, match=r"join\(\) first"):
        client.wait_for(lambda _: False, deadline_s=1, what="ffn-0")
    client.join(deadline_s=2)
    with pytest.raises(DeadlineExceeded, match=r"ffn-0 .* 0\.1 s; .*attention-0 \(starting\)"):
        client.wait_for(lambda x: bool(x.of("ffn")), deadline_s=0.1, what="ffn-0")


def test_progress(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    client = control_client(server.address, "gateway", 0, progress=lines.append)
    client.join(deadline_s=2)
    monkeypatch.setattr("afd.control.client._PROGRESS_S", 0.05)  # joining may take longer
    with pytest.raises(DeadlineExceeded):
        client.wait_for(lambda _: False, deadline_s=1.0, what="ffn-0, ffn-1")
    client.close()
    assert lines[0] == "waiting for ffn-0, ffn-1 (0 s)"
    assert len(lines) >= 2


def test_joining_twice_is_an_error(make_client: MakeClient) -> None:
    client = make_client()
    client.join(deadline_s=2)
    with pytest.raises(AfdError, match="has joined already"):
        client.join(deadline_s=2)


def test_a_client_does_not_join_again_while_its_thread_is_stuck(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads would share one pipe, and the first to end would close it for both."""
    monkeypatch.setattr("afd.control.client._CLOSE_S", 0.1)
    client, go_on = make_client(), threading.Event()
    client.on_change(lambda _: go_on.wait(10))
    client.join(deadline_s=2)
    client.close()
    with pytest.raises(AfdError, match="has joined already"):
        client.join(deadline_s=2)
    go_on.set()
    monkeypatch.undo()
    client.close()
    client.join(deadline_s=2)
    assert client.connected


def test_garbage_does_not_harm_the_server(server: ControlServer, make_client: MakeClient) -> None:
    host, port = server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
    from zmq import DEALER, Context  # only here, to send what a foreign ZeroMQ program would

    own = KEYS.member("ffn-1")
    with Context() as context, context.socket(DEALER) as foreign:
        foreign.curve_serverkey = own.server_public.encode()
        foreign.curve_publickey = own.client_public.encode()
        foreign.curve_secretkey = own.client_secret.encode()
        foreign.connect(server.address)
        foreign.send(b"\xc1 not msgpack")
        assert foreign.poll(2000) and b"same version of afd" in foreign.recv()
    make_client().join(deadline_s=2)


# --- keys -------------------------------------------------------------------------------------


@pytest.fixture
def secure() -> Iterator[tuple[ControlServer, CurveKeys]]:
    keys = CurveKeys.generate()
    with control_server(keys=keys) as running:
        yield running, keys


def test_right_keys(secure: tuple[ControlServer, CurveKeys], make_client: MakeClient) -> None:
    server, keys = secure
    client = make_client(keys=keys, address=server.address)
    client.join(deadline_s=2)
    assert operator.status(server.address, keys.operator) == client.members


def test_wrong_keys_are_refused_quickly(
    secure: tuple[ControlServer, CurveKeys], make_client: MakeClient
) -> None:
    server, keys = secure
    other = CurveKeys.generate()
    wrong_client = replace(other.operator, server_public=keys.server_public)
    for wrong, part in ((wrong_client, "keys differ"), (other.operator, "keys may differ")):
        start = time.monotonic()
        with pytest.raises(HandshakeRefused, match=part) as caught:
            ControlClient(server.address, wrong, role="gateway", index=0).join(deadline_s=5)
        assert "same control.keys file" in str(caught.value)
        assert server.address in str(caught.value)
        assert time.monotonic() - start < 3
        with pytest.raises(HandshakeRefused, match=part):
            operator.status(server.address, wrong)
    assert server.members.members == ()


def test_a_server_without_keys_is_refused() -> None:
    from zmq import ROUTER, Context

    with Context() as context, context.socket(ROUTER) as plain:
        plain.bind_to_random_port("tcp://127.0.0.1")
        address = plain.getsockopt_string(32)  # ZMQ_LAST_ENDPOINT
        with pytest.raises(HandshakeRefused, match=r"keys"):
            control_client(address, "gateway", 0).join(deadline_s=5)


def test_listening_on_all_addresses() -> None:
    server = control_server("tcp://*:0")
    assert not server.address.endswith(":0")
    server.close()


# --- addresses and deadlines --------------------------------------------------------------------


def test_address_in_use(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="already in use") as caught:
        control_server(server.address)
    assert server.address in str(caught.value)
    # The path of a Unix socket must be short, so use a relative one.
    monkeypatch.chdir(tmp_path)
    with (
        control_server("ipc://c.sock") as local,
        control_client(local.address, "gateway", 0) as client,
    ):
        client.join(deadline_s=2)
        with pytest.raises(ConfigError, match="already in use"):
            control_server("ipc://c.sock")
        assert (tmp_path / "c.sock").stat().st_mode & 0o077 == 0


def test_address_of_another_host() -> None:
    with pytest.raises(ConfigError, match="not an address of this host"):
        control_server("tcp://192.0.2.1:0")


def test_unreachable_server(address: str) -> None:
    client = control_client(address, "ffn", 0)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        client.join(deadline_s=0.4)
    assert 0.4 <= time.monotonic() - start < 4
    assert str(caught.value) == (
        f"control plane at {address} did not answer within 0.4 s; "
        "is `afd control` running, and is the address reachable from this host?"
    )
    with pytest.raises(DeadlineExceeded, match="did not answer within"):
        operator.status(address, KEYS.operator, deadline_s=0.2)


def test_something_else_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:  # accepts and stays silent
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match="did not answer within"):
            control_client(address, "gateway", 0).join(deadline_s=0.3)


def test_client_may_come_before_the_server(address: str) -> None:
    client = control_client(address, "gateway", 0)
    starter = threading.Timer(0.3, lambda: servers.append(control_server(address).start()))
    servers: list[ControlServer] = []
    starter.start()
    try:
        assert client.join(deadline_s=5) > 0
    finally:
        starter.join()
        client.close()
        for server in servers:
            server.close()
