"""The gateway role: joining the control plane, and every way to end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp
import pytest
from control_support import control_client
from gateway_fakes import QUICK, FakeInstance

from afd.control.messages import Member, Members, Seat
from afd.errors import ConfigError, HandshakeRefused
from afd_gateway.main import ControlProvider, run_gateway, upstreams_of


@dataclass(frozen=True)
class FakeMember:
    role: str
    index: int
    generation: int = 1
    api_url: str = ""
    metrics_url: str = ""
    state: str = "ready"
    rank: int = 0

    @property
    def id(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class FakeMembers:
    version: int
    members: tuple[FakeMember, ...]
    draining: bool = False
    seats: tuple[Seat, ...] = ()

    def seat(self, member: str) -> None:
        return None


class FakeClient:
    def __init__(self, *members: FakeMember, refuse: Exception | None = None) -> None:
        self.members = FakeMembers(1, members)
        self.calls: list[str] = []
        self.stopping = False
        self.refused: str | None = None
        self._refuse = refuse
        self._callback: object = None

    def on_change(self, callback: object) -> None:
        self._callback = callback

    def join(
        self, *, addresses: tuple[str, ...], api_url: str, metrics_url: str, deadline_s: float
    ) -> int:
        self.calls.append("join")
        assert metrics_url == f"{api_url}/metrics" and not addresses and deadline_s == 7.0
        if self._refuse:
            raise self._refuse
        self.change(*self.members.members, FakeMember("gateway", 0, api_url=api_url))
        return 4

    def change(self, *members: FakeMember) -> None:
        self.members = FakeMembers(self.members.version + 1, members)
        assert callable(self._callback)
        self._callback(self.members)

    def set_state(self, state: str) -> None:
        self.calls.append(state)

    def leave(self) -> None:
        self.calls.append("leave")

    def close(self) -> None:
        self.calls.append("close")


def test_the_role_joins_serves_drains_on_sigterm_and_returns_zero() -> None:
    client = FakeClient(FakeMember("ffn", 0, metrics_url="http://127.0.0.1:9/metrics"))
    told: list[tuple[int, str]] = []
    ended = threading.Event()

    def ask_then_end(url: str) -> None:
        """Runs beside the gateway; acts as the client and as the supervisor."""

        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                while "ready" not in client.calls:
                    await asyncio.sleep(0.01)
                async with session.get(f"{url}/v1/models") as answer:
                    told.append((answer.status, await answer.text()))
                instance = FakeInstance()
                await instance.start()
                client.change(
                    *client.members.members,
                    FakeMember("attention", 0, api_url=f"http://127.0.0.1:{instance.port}"),
                )
                for _ in range(200):
                    async with session.get(f"{url}/health") as answer:
                        if answer.status == 200:
                            break
                    await asyncio.sleep(0.01)
                async with session.get(f"{url}/v1/models") as answer:
                    told.append((answer.status, await answer.text()))
                await instance.stop()

        try:
            asyncio.run(asyncio.wait_for(ask(), 5.0))
        finally:
            if not ended.is_set():  # a late SIGTERM would end the test itself
                os.kill(os.getpid(), signal.SIGTERM)

    beside: list[threading.Thread] = []

    def on_listening(url: str) -> None:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        beside.append(threading.Thread(target=ask_then_end, args=(url,)))
        beside[0].start()

    code = run_gateway(QUICK, lambda: client, join_deadline_s=7.0, on_listening=on_listening)
    ended.set()
    beside[0].join(5.0)
    assert code == 0
    assert client.calls == ["join", "ready", "draining", "leave", "close"]
    assert told[0][0] == 503 and "attention-0 has not joined" in told[0][1]
    assert told[1][0] == 200 and '"me": "attention-0"' in told[1][1]
    assert "gateway-0" not in told[0][1]


def test_a_refused_gateway_ends_with_the_reason() -> None:
    client = FakeClient(refuse=ConfigError("two gateways"))
    with pytest.raises(ConfigError, match="two gateways"):
        run_gateway(QUICK, lambda: client, join_deadline_s=7.0)
    assert client.calls == ["join", "close"]


def test_the_role_ends_if_the_operator_stops_it_or_a_gateway_replaces_it() -> None:

    def run_until(change: Callable[[FakeClient], None]) -> FakeClient:
        client = FakeClient()

        def later() -> None:
            while "ready" not in client.calls:
                time.sleep(0.01)
            change(client)
            client.change()

        thread = threading.Thread(target=later)
        thread.start()
        try:
            run_gateway(QUICK, lambda: client, join_deadline_s=7.0)
        finally:
            thread.join(5.0)
        return client

    def stopping(client: FakeClient) -> None:
        client.stopping = True

    def displaced(client: FakeClient) -> None:
        client.refused = "gateway-0 is taken"

    assert run_until(stopping).calls == ["join", "ready", "draining", "leave", "close"]
    with pytest.raises(HandshakeRefused, match="gateway-0 is taken"):
        run_until(displaced)


def test_a_taken_port_ends_the_role_before_it_connects() -> None:

    def never() -> object:
        raise AssertionError("the role connected before it had the port")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = replace(QUICK, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="is in use"):
            run_gateway(settings, never, join_deadline_s=7.0)


def test_sigterm_ends_a_gateway_that_still_looks_for_the_control_plane() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # listens but never answers
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        began = time.monotonic()
        try:
            code = run_gateway(
                QUICK,
                lambda: control_client(address, "gateway", 0),
                join_deadline_s=60.0,
            )
        finally:
            timer.cancel()
        assert code == 0
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("seat", "state"),
    [
        (Seat("attention-1"), "ready"),
        (Seat("attention-1", "drain"), "draining"),
        (Seat("attention-1", "remove"), "draining"),
        (Seat("attention-1", "restart", generation=5), "draining"),
        (Seat("attention-1", "restart", generation=4), "ready"),  # that process is gone
        (Seat("attention-0", "remove"), "ready"),
    ],
)
def test_an_instance_that_operators_want_away_gets_no_new_requests(seat: Seat, state: str) -> None:
    members = (
        Member("attention", 1, 5, state="ready", api_url="http://h:1"),
        Member("ffn", 0, 6, state="ready"),
    )
    attention, ffn = upstreams_of(Members(members=members, seats=(seat,)))
    assert (attention.state, ffn.state) == (state, "ready")


def test_further_ranks_of_an_instance_take_no_requests() -> None:
    ranks = tuple(Member("attention", 0, 5 + r, rank=r, state="ready") for r in range(2))
    found = upstreams_of(Members(members=(*ranks, Member("ffn", 0, 9, rank=1))))
    assert [upstream.id for upstream in found] == ["attention-0", "ffn-0.1"]


def test_the_complete_deployment_is_what_operators_want() -> None:
    client = FakeClient()
    settings = replace(QUICK, attention_instances=2, ffn_instances=1)
    live = replace(settings, wanted=ControlProvider(client, settings).wanted)
    assert live.expected_ids() == settings.expected_ids() == ("attention-0", "attention-1", "ffn-0")
    client.members = FakeMembers(
        2, (), seats=(Seat("attention-0"), Seat("attention-2"), Seat("ffn-0"))
    )
    assert live.expected_ids() == ("attention-0", "attention-2", "ffn-0")
