"""What the gateway bounds: descriptors, connections, time, bodies; and what it never logs."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from gateway_fakes import QUICK, FakeInstance, Rig, rig, run

from afd_gateway.accept import Acceptor
from afd_gateway.bodies import is_too_slow
from afd_gateway.descriptors import connections_allowed
from afd_gateway.listener import bind_listener

GET = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(url: str, sent: bytes = b"") -> Pipe:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(sent)
    return reader, writer


async def exchange(url: str, sent: bytes) -> tuple[int, dict[str, str], dict[str, object]]:
    """Returns status, headers and JSON body of the response on a connection that then ends."""
    reader, writer = await connect(url, sent)
    raw = await asyncio.wait_for(reader.read(), 3.0)
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, json.loads(body)


def assert_openai_error(status: int, headers: dict[str, str], body: dict[str, object]) -> None:
    assert headers["Content-Type"].startswith("application/json")
    assert set(body) == {"error"}
    error = body["error"]
    assert isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status


async def refused(gw: Rig, reason: str) -> int:
    """Returns the count of refusals for one reason."""
    async with gw.client.get(f"{gw.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = f'afd_gateway_refused_total{{instance="gateway-0",reason="{reason}"}} '
    (line,) = (line for line in lines if line.startswith(name))
    return int(float(line.removeprefix(name)))


STARTS = """
import logging, resource
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 300))
from afd_gateway.main import run_gateway
from afd_gateway.settings import GatewaySettings
class Stop(Exception): pass
def connect(): raise Stop
try: run_gateway(GatewaySettings(port=0), connect, join_deadline_s=1.0)
except Stop: print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_gateway_raises_its_descriptor_limit_and_warns_if_it_is_low() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout == "(300, 300)\n"
    assert "INFO limit of open files: 300 (was 128, hard limit 300)" in ended.stderr
    assert "WARNING the limit of open files (300) allows only 86 client" in ended.stderr
    assert "raise the hard limit" in ended.stderr


def test_every_allowed_connection_leaves_a_descriptor_for_its_upstream() -> None:
    for limit in (256, 300, 1024, 2**20):
        assert 2 * connections_allowed(limit) + 128 <= limit
    assert connections_allowed(10) == 1
    assert connections_allowed(resource.RLIM_INFINITY) > 10_000


def test_idle_and_half_sent_connections_end_but_streams_do_not() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=replace(QUICK, idle_timeout_s=0.3)) as gw:
            async with gw.client.post(f"{gw.url}/v1/stream") as stream:
                assert await stream.content.readany()
                began = time.monotonic()
                pipes = [
                    await connect(gw.url),
                    await connect(gw.url, b"GET /v1/mod"),
                    await connect(gw.url, GET[:-2] + b"X-Slow: "),
                    await connect(gw.url, GET),
                ]
                for reader, _ in pipes:
                    await asyncio.wait_for(reader.read(), 3.0)  # the gateway closes it
                assert 0.2 < time.monotonic() - began < 3.0
                instance.go_on.set()
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            for _, writer in pipes:
                writer.close()

    run(work())


def test_a_body_that_stops_arriving_gets_408_and_a_slow_one_passes() -> None:
    async def drip() -> AsyncIterator[bytes]:
        for _ in range(6):
            yield b"x"
            await asyncio.sleep(0.15)

    async def work() -> None:
        settings = replace(QUICK, body_timeout_s=0.4, min_body_bytes_per_s=1.0)
        async with rig(FakeInstance(), settings=settings) as gw:
            for framing in (
                b"Content-Length: 10\r\n\r\nabc",
                b"Transfer-Encoding: chunked\r\n\r\n",
            ):
                told = await exchange(gw.url, b"POST /v1/x HTTP/1.1\r\nHost: h\r\n" + framing)
                assert told[0] == 408
                assert_openai_error(*told)
            async with gw.client.post(f"{gw.url}/v1/x", data=drip()) as answer:
                assert (await answer.json())["size"] == 6
            assert await refused(gw, "body_timeout") == 2
            assert gw.server.gateway.bodies.held == 0

    run(work())


def test_a_dripping_body_is_bounded_in_total() -> None:
    def slow(elapsed_s: float, silent_s: float, size: int) -> bool:
        return is_too_slow(
            elapsed_s=elapsed_s,
            silent_s=silent_s,
            size=size,
            timeout_s=30.0,
            min_bytes_per_s=1024.0,
        )

    assert slow(31.0, 1.0, 31)  # a byte each second
    assert not slow(600.0, 1.0, 64 * 2**20)  # 64 MiB at 110 kB/s
    assert slow(600.0, 30.0, 64 * 2**20)


def test_connections_beyond_the_cap_get_503_and_streams_go_on() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=replace(QUICK, max_connections=4)) as gw:
            async with gw.client.post(f"{gw.url}/v1/stream") as stream:
                assert await stream.content.readany()
                pipes = [await connect(gw.url) for _ in range(3)]
                for _ in range(100):
                    began = time.monotonic()
                    told = await exchange(gw.url, GET)
                    assert time.monotonic() - began < 1.0
                    assert told[0] == 503
                    assert_openai_error(*told)
                    assert told[1]["Connection"] == "close" and told[1]["Retry-After"] == "5"
                for _, writer in pipes:
                    writer.close()
                instance.go_on.set()
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            async with gw.client.get(f"{gw.url}/v1/models") as answer:
                assert answer.status == 200
            assert await refused(gw, "connections") == 100

    run(work())


class StarvedListener(socket.socket):
    """Fails the first accepts, as without a free descriptor."""

    failures = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_accepts_without_a_descriptor_are_counted_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        bound = bind_listener("127.0.0.1", 0)
        listener = StarvedListener(fileno=bound.detach())
        listener.setblocking(False)
        reasons: list[str] = []
        made = asyncio.Event()

        def make(end: object) -> asyncio.Protocol:
            made.set()
            return asyncio.Protocol()

        acceptor = Acceptor(listener, make, limit=9, retry_after_s=5, refused=reasons.append)
        acceptor.start()
        try:
            _, writer = await connect(f"http://x:{listener.getsockname()[1]}")
            await asyncio.wait_for(made.wait(), 3.0)
            writer.close()
        finally:
            acceptor.close()
        assert reasons == ["descriptors"] * 3

    run(work())
    assert [r for r in caplog.records if r.exc_info] == []
    assert 1 <= len([r for r in caplog.records if "cannot accept" in r.getMessage()]) <= 3


def test_a_burst_of_connections_is_accepted_in_parts() -> None:
    """Streams that run get their turn in between."""

    async def work() -> None:
        listener = bind_listener("127.0.0.1", 0)
        number = listener.getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", number)) for _ in range(40)]
        acceptor = Acceptor(
            listener, lambda end: asyncio.Protocol(), limit=99, retry_after_s=5, refused=print
        )
        acceptor.start()
        seen = set()
        while acceptor.open < 40:
            await asyncio.sleep(0)
            seen.add(acceptor.open)
        acceptor.close()
        assert seen & set(range(1, 17)) and seen & set(range(17, 40))
        for client in clients:
            client.close()

    run(work())


SERVES = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from afd_gateway.listener import bind_listener
from afd_gateway.server import start_gateway
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Upstream
async def work():
    settings = GatewaySettings(port=0, probe_interval_s=0.05, abandon_after_s=0.5,
                               probe_timeout_s=0.2)
    upstream = Upstream("attention-0", sys.argv[1], "", 1)
    server = await start_gateway(settings, lambda: (upstream,), bind_listener("127.0.0.1", 0))
    print(server.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.0)
asyncio.run(work())
"""


def test_306_idle_connections_under_256_descriptors_end_no_stream() -> None:
    async def work() -> None:
        instance = FakeInstance()
        await instance.start()
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVES, instance.upstream().api_url,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert gateway.stdin and gateway.stdout
        pipes: list[Pipe] = []
        try:
            url = (await gateway.stdout.readline()).decode().strip()
            async with aiohttp.ClientSession() as client:
                while (await client.get(f"{url}/v1/models")).status != 200:
                    await asyncio.sleep(0.02)
                streams = [await client.post(f"{url}/v1/stream") for _ in range(20)]
                for stream in streams:
                    assert await stream.content.readany()
                pipes = list(await asyncio.gather(*(connect(url) for _ in range(306))))
                await asyncio.sleep(1.0)  # longer than abandon_after_s
                assert (await exchange(url, GET))[0] == 503
                instance.go_on.set()
                for stream in streams:
                    assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        finally:
            for _, writer in pipes:
                writer.close()
            _, told = await gateway.communicate(b"")
            await instance.stop()
        assert b"Traceback" not in told and len(told) < 10_000

    run(work(), 30.0)


def test_bodies_are_bounded_together() -> None:
    async def grow() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100
            await asyncio.sleep(0.05)

    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=replace(QUICK, max_total_body_bytes=1000)) as gw:
            first = asyncio.create_task(gw.client.post(f"{gw.url}/v1/wait", data=b"x" * 800))
            await asyncio.wait_for(instance.arrived.wait(), 3.0)
            assert gw.server.gateway.bodies.held == 800
            for body in (b"x" * 300, grow()):
                async with gw.client.post(f"{gw.url}/v1/x", data=body) as answer:
                    assert answer.status == 503
                    await gw.error(answer)
                    assert answer.headers["Retry-After"] == "5"
            async with gw.client.get(f"{gw.url}/v1/models") as answer:
                assert answer.status == 200  # no body
            instance.go_on.set()
            async with await first as answer:
                assert answer.status == 200
            assert len(instance.bodies[0]) == 800
            async with gw.client.post(f"{gw.url}/v1/x", data=b"x" * 900) as answer:
                assert answer.status == 200
            assert gw.server.gateway.bodies.held == 0
            assert await refused(gw, "bodies") == 2

    run(work())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: h\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 431),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (b"GET /nothing HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 404),
        (b"POST /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 405),
    ],
)
def test_errors_have_openais_shape(sent: bytes, status: int) -> None:
    async def work() -> None:
        async with rig() as gw:
            told = await exchange(gw.url, sent)
            assert told[0] == status
            assert_openai_error(*told)
            assert await refused(gw, "malformed") == (status in (400, 431))

    run(work())


def test_openapi_json_comes_from_an_instance() -> None:
    async def work() -> None:
        async with rig(FakeInstance()) as gw, gw.client.get(f"{gw.url}/openapi.json") as answer:
            assert (await answer.json())["target"] == "/openapi.json"

    run(work())


@pytest.mark.parametrize("junk", [b"s3cret" * 2000, b"s3cret\0", b"s3cret\r\n s3cret: \xff\n"])
def test_credentials_of_a_refused_request_are_never_logged(
    junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def work() -> None:
        async with rig(FakeInstance()) as gw:
            await exchange(
                gw.url,
                b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
                b"Authorization: Bearer " + junk + b"\r\n\r\n",
            )

    run(work())
    assert "malformed" in caplog.text
    assert "s3c" not in caplog.text


def test_a_client_that_does_not_read_loses_its_connection_and_its_request() -> None:
    async def work() -> None:
        flooding = asyncio.Event()

        class Flood(FakeInstance):
            async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                flooding.set()
                while True:
                    await response.write(b"data: " + b"x" * 60_000 + b"\n\n")

        instance = Flood()
        async with rig(instance, settings=replace(QUICK, slow_client_s=0.3)) as gw:
            request = b"POST /v1/stream HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
            slow, writer = await connect(gw.url, request)
            slow._transport.pause_reading()  # type: ignore[attr-defined]
            steady, other = await connect(gw.url, request)
            await flooding.wait()
            read = 0
            while not instance.aborted.is_set():
                read += len(await asyncio.wait_for(steady.read(65536), 3.0))
            assert read > 0 and not steady.at_eof()
            assert await refused(gw, "slow_client") == 1
            for pipe in (writer, other):
                pipe.close()

    run(work())
