"""Prompts are not sent to a port on which another user listens."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import aiohttp
import pytest
from gateway_fakes import QUICK, FakeInstance, rig, run

from afd_gateway import owner
from afd_gateway.owner import ForeignListener, is_loopback, listener_uid, make_connector
from afd_gateway.pool import probe_once
from afd_gateway.upstreams import Condition, Probe

NOBODY = 65534
INTRUDER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    peer, _ = listener.accept()
    print(len(peer.recv(65536)), flush=True)
    peer.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
    peer.close()
"""


def test_listeners_of_this_user_are_found() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"),
                         (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")):  # fmt: skip
        try:
            listener = socket.create_server((host, 0), family=family)
        except OSError:  # this machine has no IPv6
            continue
        with listener:
            port = listener.getsockname()[1]
            reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            assert listener_uid(reached, port) == os.geteuid()
            if host == "::" and not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
                assert listener_uid("127.0.0.1", port) == os.geteuid()
        assert listener_uid(reached, port) is None


def test_a_connection_is_not_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert listener_uid("127.0.0.1", connection.getsockname()[1]) is None


def test_without_netlink_connections_are_not_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(host: str, port: int) -> int | None:
        raise PermissionError("netlink")

    monkeypatch.setattr(owner, "listener_uid", refuses)

    async def work() -> None:
        async with aiohttp.ClientSession(connector=make_connector(own_upstreams=True)) as session:
            assert not isinstance(session.connector, owner.OwnedConnector)

    run(work())
    assert "owners of ports are not checked: netlink" in caplog.text


def test_loopback() -> None:
    assert is_loopback("127.3.4.5") and is_loopback("::1") and not is_loopback("10.0.0.1")


@pytest.fixture
def intruder() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Yields (port, process) of another user's server, which prints the bytes it receives."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", INTRUDER, str(NOBODY)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        yield int(child.stdout.readline()), child
    finally:
        child.kill()
        child.communicate()


def test_nothing_is_sent_to_another_users_server(
    intruder: tuple[int, subprocess.Popen[str]],
) -> None:
    port, child = intruder

    async def work() -> None:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(connector=make_connector(own_upstreams=True)) as session:
            with pytest.raises(ForeignListener, match="user 65534 listens at port"):
                await session.post(f"{url}/v1/completions", data=b"a prompt")
            assert await probe_once(session, url, 1.0) is Probe.REFUSED

    run(work())
    child.terminate()
    out, _ = child.communicate(timeout=5)
    assert set(out.split()) <= {"0"}  # connections carried no bytes


def test_a_request_goes_to_another_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """attention-0 died after its last probe, and another user took its port."""

    async def work() -> None:
        first, second = FakeInstance("attention-0"), FakeInstance("attention-1")
        settings = replace(QUICK, own_upstreams=True, probe_interval_s=60.0)
        async with rig(first, second, settings=settings) as gw:
            for name in ("attention-0", "attention-1"):
                await gw.until(name, Condition.HEALTHY)
            real = listener_uid

            def seen(host: str, port: int) -> int | None:
                return NOBODY if port == first.port else real(host, port)

            monkeypatch.setattr(owner, "listener_uid", seen)
            before = len(first.seen)
            async with gw.client.post(f"{gw.url}/v1/completions", json={}) as answer:
                assert answer.status == 200
                assert answer.headers["x-afd-instance"] == "attention-1"
            await asyncio.sleep(0.1)
            assert len(first.seen) == before

    run(work())
