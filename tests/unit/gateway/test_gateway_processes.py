"""Several gateway processes on one port: the listener, shared counts, metrics, and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from gateway_fakes import QUICK, FakeInstance, run
from prometheus_client.parser import text_string_to_metric_families
from token_fakes import TokenInstance, events_of

from afd.errors import ConfigError
from afd_gateway.api_keys import ApiKeys, add_api_key
from afd_gateway.counts import Counts, make_shared
from afd_gateway.errors import GatewayError
from afd_gateway.inherited import held_port, inherited
from afd_gateway.kept_answers import make_answers
from afd_gateway.listener import bind_listener, bind_port, listening
from afd_gateway.server import GatewayServer, start_gateway
from afd_gateway.upstreams import Upstream


def test_counts_add_up_over_processes_and_a_new_process_starts_at_zero() -> None:
    shared = make_shared(3)
    one, two, three = (Counts(shared, i, 3) for i in range(3))
    one.add("key a", 2)
    two.add("key a", 1)
    two.add("key b", 5)
    assert [c.total("key a") for c in (one, two, three)] == [3, 3, 3]
    assert [c.others("key a") for c in (one, two, three)] == [1, 2, 3]
    assert three.total("key b") == 5 and three.total("key c") == 0
    again = Counts(shared, 1, 3)  # process 1 was killed and started again
    assert again.total("key a") == 2 and again.total("key b") == 0
    alone = Counts()
    alone.add("x", 1)
    assert (alone.total("x"), alone.others("x")) == (1, 0)
    os.close(shared)


def test_too_many_names_are_counted_per_process(caplog: pytest.LogCaptureFixture) -> None:
    shared = make_shared(2)
    one, two = Counts(shared, 0, 2), Counts(shared, 1, 2)
    one._map[: 4096 * 16] = b"x" * (4096 * 16)  # type: ignore[index]
    one.add("late", 1)
    assert one.total("late") == 1 and two.total("late") == 0
    assert "limits of late are per process" in caplog.text
    os.close(shared)


def test_a_key_limit_holds_over_processes(tmp_path: Path) -> None:
    key = add_api_key(tmp_path / "keys", "alice", running=2)
    headers = {"Authorization": f"Bearer {key}"}
    shared = make_shared(2)
    one, two = (
        ApiKeys(tmp_path / "keys", 5, lambda _: None, counts=Counts(shared, i, 2)) for i in range(2)
    )
    with one.admit(headers), two.admit(headers):
        for keys in (one, two):
            with pytest.raises(GatewayError, match="may run 2 requests"), keys.admit(headers):
                pass
    with two.admit(headers), two.admit(headers):
        pass
    os.close(shared)


def test_by_hand_processes_share_a_port_only_if_both_want_to() -> None:
    with bind_listener("127.0.0.1", 0, shared=True) as one:
        port = one.getsockname()[1]
        with bind_listener("127.0.0.1", port, shared=True):
            pass
        with pytest.raises(ConfigError, match="is in use"):
            bind_listener("127.0.0.1", port)


def test_a_held_port_keeps_connections_while_nobody_serves() -> None:
    with held_port("127.0.0.1", 0, 2) as port:
        environment = port.inherited.environment()
        assert inherited(environment) == port.inherited and inherited({}) is None
        address = socket.socket(fileno=os.dup(port.inherited.listener)).getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)  # nobody has served yet
        with listening(socket.socket(fileno=os.dup(port.inherited.listener))):
            pass  # a gateway process that ends
        with socket.create_connection(address) as client:
            listener = listening(socket.socket(fileno=os.dup(port.inherited.listener)))
            served, _ = listener.accept()
            served.sendall(b"hello")
            served.close()
            assert client.recv(5) == b"hello"
            port.refuse()
            port.refuse()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            listener.close()
        with bind_port(*address):
            pass


@contextlib.asynccontextmanager
async def two_processes(instance: FakeInstance) -> AsyncIterator[list[GatewayServer]]:
    """Two gateways on one listener that know each other, as members of one control plane."""
    await instance.start()
    listener = bind_listener("127.0.0.1", 0)
    shared = make_shared(2)
    servers: list[GatewayServer] = []

    def provider(own: int) -> tuple[Upstream, ...]:
        others = (
            Upstream(f"gateway-{i}", "", server.metrics_url, 1)
            for i, server in enumerate(servers)
            if i != own
        )
        return (instance.upstream(), *others)

    try:
        for i in range(2):
            settings = replace(QUICK, instance=f"gateway-{i}", process=i, processes=2)
            servers.append(
                await start_gateway(
                    settings,
                    lambda own=i: provider(own),
                    listener.dup(),
                    Counts(shared, i, 2),
                )
            )
        for server in servers:
            while not any(view.eligible for view in server.gateway.pool.views()):
                await asyncio.sleep(0.01)
        yield servers
    finally:
        for server in servers:
            await server.stop(0.0)
        listener.close()
        await instance.stop()
        os.close(shared)


def test_metrics_add_up_over_the_processes() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with two_processes(instance) as servers, aiohttp.ClientSession() as client:
            url = servers[0].url
            for _ in range(30):  # a new connection each, so that both processes serve some
                async with client.get(f"{url}/v1/models", headers={"Connection": "close"}) as got:
                    assert got.status == 200
            stream = await client.post(f"{url}/v1/stream")
            assert await stream.content.readany()
            async with client.get(f"{url}/metrics") as answer:
                page = await answer.text()
            async with client.get(f"{url}/health") as answer:
                members = [member["id"] for member in (await answer.json())["members"]]
            assert members == ["attention-0", "ffn-0"]
            samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
            models = [
                s for s in samples
                if s.name == "afd_gateway_requests_total"
                and s.labels["path_template"] == "/v1/models"
            ]  # fmt: skip
            assert sum(sample.value for sample in models) == 30
            inflight = [s for s in samples if s.name == "afd_gateway_inflight_requests"]
            assert {s.labels["gateway"] for s in inflight} == {"gateway-0", "gateway-1"}
            assert sum(sample.value for sample in inflight) == 1
            loads = [server.gateway.pool.views()[0].load for server in servers]
            assert loads == [1, 1]  # each sees the requests of both
            up = {s.labels["instance"]: s.value for s in samples if s.name == "afd_peer_up"}
            assert up["attention-0"] == 1 and {up.get("gateway-0", 1), up.get("gateway-1", 1)} == {
                1
            }
            instance.go_on.set()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")

    run(work())


SERVES = """
import asyncio, socket, sys
from afd_gateway.listener import listening
from afd_gateway.loop import run
from afd_gateway.server import start_gateway
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Upstream
async def work():
    settings = GatewaySettings(
        ffn_instances=0, probe_interval_s=0.05, instance=sys.argv[3], processes=2,
        process=int(sys.argv[3][-1]), answers=int(sys.argv[4]),
    )
    upstream = Upstream("attention-0", sys.argv[2], "", 1)
    listener = listening(socket.socket(fileno=int(sys.argv[1])))
    server = await start_gateway(settings, lambda: (upstream,), listener, accept=False)
    while not server.gateway.pool.settled:
        await asyncio.sleep(0.01)
    server.accept()
    print("ready", flush=True)
    await asyncio.Event().wait()
run(work())
"""


class Processes:
    """Gateway processes on one held port. A context manager: it ends them."""

    def __init__(self, instance: FakeInstance) -> None:
        self._instance = instance
        self._answers = make_answers(2)
        self._listener = bind_port("127.0.0.1", 0)
        self._all: list[subprocess.Popen[bytes]] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            self.kill(process)
        self._listener.close()
        os.close(self._answers)

    async def start(self, name: str) -> subprocess.Popen[bytes]:
        port = self._listener.fileno()
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SERVES,
                str(port),
                self._instance.upstream().api_url,
                name,
                str(self._answers),
            ],
            stdout=subprocess.PIPE,
            pass_fds=(port, self._answers),
        )
        self._all.append(process)
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_killed_process_loses_only_its_own_connections() -> None:
    async def work() -> None:
        instance = FakeInstance()
        await instance.start()
        with Processes(instance) as processes:
            first, second = await processes.start("gateway-0"), await processes.start("gateway-1")
            alone = aiohttp.TCPConnector(limit=0, force_close=True)
            async with aiohttp.ClientSession(connector=alone) as client:

                async def stream() -> bytes | None:
                    try:
                        async with client.post(f"{processes.url}/v1/stream") as answer:
                            return await answer.read()
                    except aiohttp.ClientError:
                        return None

                streams: list[asyncio.Task[bytes | None]] = []
                for idle in (second, first):  # 20 streams each: the kernel chooses any that runs
                    idle.send_signal(signal.SIGSTOP)
                    streams += [asyncio.create_task(stream()) for _ in range(20)]
                    while len(instance.seen) < len(streams):
                        await asyncio.sleep(0.01)
                    idle.send_signal(signal.SIGCONT)
                processes.kill(first)
                for _ in range(20):  # no connection is refused
                    async with client.get(f"{processes.url}/v1/models") as answer:
                        assert answer.status == 200
                instance.go_on.set()
                ended = await asyncio.gather(*streams)
                whole = [body for body in ended if body and body.endswith(b"data: [DONE]\n\n")]
                assert len(whole) == 20 and ended[:20].count(None) == 20

                processes.kill(second)
                late = asyncio.create_task(stream())  # connects while no process lives
                await asyncio.sleep(0.1)
                assert not late.done()
                await processes.start("gateway-0")
                assert (await late or b"").endswith(b"data: [DONE]\n\n")
        await instance.stop()

    run(work(), 30.0)


async def read_some(answer: aiohttp.ClientResponse, events: int) -> bytes:
    read = b""
    while read.count(b"\n\n") < events:
        read += await answer.content.readany()
    return read


def test_a_client_whose_process_was_killed_gets_the_rest_of_its_stream() -> None:
    """At the other process of the port, and then at the one that was started again."""
    fields = {"prompt": "x", "stream": True, "max_tokens": 30}

    async def work() -> None:
        instance = TokenInstance(die_after=7, how="hang")
        await instance.start()
        alone = aiohttp.TCPConnector(limit=0, force_close=True)
        with Processes(instance) as processes:
            async with aiohttp.ClientSession(connector=alone) as client:

                async def ask(number: int, last: int) -> aiohttp.ClientResponse:
                    headers = {"X-Request-Id": f"r-{number}", "Last-Event-ID": str(last)}
                    return await client.post(
                        f"{processes.url}/v1/completions", json=fields, headers=headers
                    )

                first = await processes.start("gateway-0")
                begun = [await ask(number, 0) for number in range(20)]
                had = [await read_some(answer, 7) for answer in begun]
                second = await processes.start("gateway-1")
                processes.kill(first)
                for answer in begun:
                    with pytest.raises(aiohttp.ClientError):
                        await answer.read()

                instance.die_after = 7  # of what is new; the tokens so far are repeated
                begun = [await ask(number, 7) for number in range(20)]
                for number, answer in enumerate(begun):
                    had[number] += await read_some(answer, 7)
                await processes.start("gateway-0")
                processes.kill(second)

                instance.die_after = 10**9
                for number in range(20):
                    answer = await ask(number, 14)
                    whole = (had[number] + await answer.read()).split(b"\n\n")[:-1]
                    lines = [event.split(b"\n") for event in whole]
                    assert [line[0] for line in lines] == [b"id: %d" % i for i in range(1, 32)]
                    plain = b"".join(line[1] + b"\n\n" for line in lines)
                    bodies = list(events_of(plain))
                    said = [choice["text"] for body in bodies for choice in body["choices"]]
                    assert said == [instance._text_of(7 * i) for i in range(30)]
                    assert len({(body["id"], body["created"]) for body in bodies}) == 1
        await instance.stop()

    run(work(), 30.0)


def test_a_port_that_is_shut_down_is_left_alone() -> None:
    async def work() -> None:
        listener = bind_listener("127.0.0.1", 0)
        held = listener.dup()
        server = await start_gateway(QUICK, lambda: (), listener)
        try:
            held.shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(0.3)
            refused = server.gateway.own_page({})
            assert 'reason="descriptors"} 0.0' in refused
        finally:
            await server.stop(0.0)
            held.close()

    run(work())
