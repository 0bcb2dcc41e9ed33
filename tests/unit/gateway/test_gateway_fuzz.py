"""No bytes on its port may end the gateway: fuzzes HTTP requests, with a seed.

AFD_FUZZ_INPUTS sets the number of inputs, AFD_FUZZ_SEED the seed. A million took 77 minutes
on a busy machine, mostly of waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time

import pytest
from gateway_fakes import FakeInstance, rig, run

INPUTS = int(os.environ.get("AFD_FUZZ_INPUTS", "2000"))
SEED = int(os.environ.get("AFD_FUZZ_SEED", "1"))
LIMIT_S = 240 + INPUTS / 100

BODY = b'{"model": "m", "prompt": "x", "stream": false}'
SEEDS = (
    b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: h\r\nAccept: */*\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nX-Request-Id: r\r\n\r\n%s" % (len(BODY), BODY),
    b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET http://other.example/v1/models HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n\r\n",
)
PIECES = (b"\r\n", b"\n", b"\0", b"\xff\xfe", b": ", b"%zz", b"?a=\xc3\x28", b" HTTP/9.9", b"//",
          b"Content-Length: -1\r\n", b"Content-Length: 99999999999\r\n", b"A" * 9000,
          b"Transfer-Encoding: gzip, chunked\r\n", b"Connection: close, Authorization\r\n",
          b"fffffffffffffffff\r\n")  # fmt: skip


def mutated(draw: random.Random) -> bytes:
    data = bytearray(draw.choice(SEEDS))
    for _ in range(draw.choice((0, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1:
                data[at:at] = draw.choice(PIECES)
            case 2:
                del data[at : at + draw.randrange(12)]
            case 3:
                data[at:at] = draw.choice(SEEDS)
            case _:
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
    return bytes(data)


@pytest.mark.timeout(LIMIT_S + 60)
def test_no_bytes_end_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(SEED)

    async def send(port: int, payload: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                writer.write(payload)
                await writer.drain()
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 0.5)
        finally:
            writer.transport.abort()

    async def work() -> None:
        async with rig(FakeInstance()) as gw:
            port = int(gw.url.rsplit(":", 1)[1])
            for start in range(0, INPUTS, 32):
                many = [mutated(draw) for _ in range(min(32, INPUTS - start))]
                await asyncio.gather(*(send(port, one) for one in many))
            async with gw.client.post(f"{gw.url}/v1/completions", json={}) as answer:
                assert answer.status == 200
            assert await gw.server.gateway.wait_idle(5.0)  # no fuzzed request is still running
            async with gw.client.get(f"{gw.url}/metrics") as answer:
                assert 'code="500"' not in await answer.text()

    began = time.monotonic()
    run(work(), LIMIT_S)
    took_s = time.monotonic() - began
    assert [r for r in caplog.records if r.exc_info] == []
    refused = [r for r in caplog.records if "malformed request" in r.getMessage()]
    print(f"{INPUTS} inputs, seed {SEED}: {took_s:.0f} s, {caplog.messages[-1]}")
    assert 1 <= len(refused) < 20 + took_s  # logged, at a limited rate
