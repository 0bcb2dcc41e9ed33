"""Answers of attention instances as bytes: heads, codings, and streams that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref
from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import make_mocked_request
from gateway_fakes import QUICK, Rig, rig, run

from afd_gateway import attempt
from afd_gateway.answer import Answer
from afd_gateway.counts import Counts
from afd_gateway.http_answer import MAX_HEAD_BYTES, AnswerReader, Malformed
from afd_gateway.pool import Lease, Pool
from afd_gateway.upstreams import Condition, Upstream

HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("seed", range(50))
def test_chunks_are_decoded_however_they_arrive(seed: int) -> None:
    draw = random.Random(seed)
    parts = [draw.randbytes(draw.choice([1, 2, 3, 40, 3000])) for _ in range(12)]
    coded = b"".join(map(chunk, parts))
    coded = CHUNKED + coded.replace(b"\r\n", b";a=b\r\n", 1) + b"0\r\nX-Trailer: 1\r\n\r\n"
    answer, found = AnswerReader("POST"), b""
    while coded and not answer.ended:
        size = draw.choice([1, 2, 5, 100, len(coded)])
        found += answer.feed(coded[:size])
        coded = coded[size:]
    assert found == b"".join(parts) and answer.ended and not coded
    assert answer.head is not None and "X-Trailer" not in answer.head.headers


@pytest.mark.parametrize(
    "coded", [b"x\r\n", b"-1\r\n", b"1_0\r\n", b"+1\r\n", b"1\r\naXX", b"1\r\na\rX",
              b"f" * 17 + b"\r\n"]
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 99])
def test_what_is_no_chunk_is_refused(coded: bytes, step: int) -> None:
    answer = AnswerReader("GET")
    answer.feed(CHUNKED)
    with pytest.raises(Malformed):
        for at in range(0, len(coded), step):
            answer.feed(coded[at : at + step])


@pytest.mark.parametrize(
    ("head", "method", "body", "ends_with_the_connection"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", "GET", b"abcde", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", "HEAD", b"", False),
        (b"HTTP/1.1 204 No Content", "GET", b"", False),
        (b"HTTP/1.0 200 OK", "GET", b"abcdefg", True),
    ],
)
def test_the_head_says_how_long_the_body_is(
    head: bytes, method: str, body: bytes, ends_with_the_connection: bool
) -> None:
    answer = AnswerReader(method)
    assert answer.feed(head + b"\r\n\r\nabcdefg") == body
    assert answer.ended != ends_with_the_connection
    answer.close()
    assert answer.ended and answer.feed(b"more") == b""


def test_an_answer_that_was_cut_off_has_not_ended() -> None:
    answer = AnswerReader("GET")
    assert answer.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab") == b"ab"
    answer.close()
    assert not answer.ended


@pytest.mark.parametrize("rest", [b"0\r\n\r\n", b""], ids=["whole", "cut off"])
def test_an_answer_leaves_nothing_to_the_garbage_collector(rest: bytes) -> None:
    gc.disable()
    try:
        answer = AnswerReader("POST")
        answer.feed(CHUNKED + chunk(b"abc") + rest)
        answer.close(whole=False)
        gone = weakref.ref(answer)
        del answer
        assert gone() is None
    finally:
        gc.enable()


def test_a_head_is_read() -> None:
    answer = AnswerReader("GET")
    lines = b"HTTP/1.1 404 Not Found\r\nA: 1\r\nA:  2 \r\nContent-Type: Text/X; q=1\r\n\r\n"
    answer.feed(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + lines)
    head = answer.head
    assert head is not None
    assert (head.status, head.reason, head.content_type) == (404, "Not Found", "text/x")
    assert (
        head.headers.getall("a") == ["1", "2"] and not head.encoded and "Link" not in head.headers
    )


@pytest.mark.parametrize(
    "head", [b"HTTP/2 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 2x0 OK", b"HTTP/1.1 200 OK\r\nno",
             b"HTTP/1.1 200 OK\r\n: x", b"HTTP/1.1 200 OK\r\nA : x", b"HTTP/1.1 200 OK\r\nA: x\ny",
             b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade",
             b"HTTP/1.1 200 OK\r\nContent-Length: -1", b"HTTP/1.1 200 OK\r\nContent-Length: 1 2",
             b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked"]
)  # fmt: skip
def test_what_is_no_head_is_refused(head: bytes) -> None:
    with pytest.raises(Malformed):
        AnswerReader("GET").feed(head + b"\r\n\r\n")


def test_a_head_that_does_not_end_is_refused() -> None:
    answer = AnswerReader("GET")
    answer.feed(b"HTTP/1.1 200 OK\r\nA: ")
    with pytest.raises(Malformed, match="too long"):
        for _ in range(MAX_HEAD_BYTES // 1000 + 1):
            answer.feed(b"x" * 1000)


@contextlib.asynccontextmanager
async def answering(*pieces: bytes, forever: bytes = b"") -> AsyncIterator[tuple[Rig, list[int]]]:
    """A gateway before a server that answers with bytes. Yields (gateway, [bytes sent])."""
    sent = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/health" in head:
                writer.write(HEALTHY)
            else:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                while forever and sent[0] < 64 * 2**20:
                    writer.write(forever)
                    await writer.drain()
                    sent[0] += len(forever)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    member = Upstream("attention-0", f"http://127.0.0.1:{port}", "", 1)
    try:
        async with rig(settings=QUICK, members=(member,), wait=False) as gw:
            await gw.until("attention-0", Condition.HEALTHY)
            yield gw, sent
    finally:
        server.close()


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConte", b"nt-Length: 2\r\n\r\nh", b"i"),
        (b"HTTP/1.0 200 OK\r\n\r\n", b"hi"),
        (STREAM + b"Transfer-Encoding: chunked\r\n\r", b"\n2\r\nhi\r\n0\r\n\r\n"),
    ],
)
def test_an_answer_arrives_in_any_pieces(pieces: tuple[bytes, ...]) -> None:
    async def work() -> None:
        async with answering(*pieces) as (gw, _), gw.client.post(gw.url + "/v1/x") as answer:
            assert answer.status == 200 and await answer.read() == b"hi"

    run(work())


@pytest.mark.parametrize(
    "pieces",
    [
        (b"nonsense\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{", b"}"),
        (STREAM + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",),
        (STREAM,),
    ],
)
def test_an_answer_that_is_not_valid_is_a_failure_of_the_instance(
    pieces: tuple[bytes, ...],
) -> None:
    async def work() -> None:
        async with answering(*pieces) as (gw, _), gw.client.post(gw.url + "/v1/x") as answer:
            assert answer.status == 502
            assert "closed before the answer was complete" in str(await gw.error(answer))

    run(work())


def test_a_client_of_http_1_0_gets_events_without_chunks() -> None:
    events = b"data: 1\n\n", b"data: 2\n\n"

    async def work() -> None:
        head = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
        async with answering(head, *map(chunk, events), b"0\r\n\r\n") as (gw, _):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(gw.url.rpartition(":")[2])
            )
            writer.write(b"POST /v1/stream HTTP/1.0\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
            got, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert b"chunked" not in got and body == b"".join(events)
            writer.close()

    run(work())


class _Closed:
    closed = False

    def close(self) -> None:
        self.closed = True

    abort = close


def test_a_request_that_is_given_up_while_it_connects_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM would go on with it."""
    found = _Closed()

    async def ask(*_: object, **__: object) -> _Closed:
        return found

    monkeypatch.setattr(attempt, "ask", ask)

    async def work() -> None:
        pool = Pool(QUICK, lambda: (Upstream("attention-0", "http://127.0.0.1:1", "", 1),))
        pool.refresh()
        (entry,) = pool._entries.values()
        request = make_mocked_request("GET", "/v1/models")
        sending = asyncio.create_task(
            attempt.send(QUICK, request, b"", Lease(entry, Counts()), own=False)
        )
        while not found.closed:
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # connected, but not told yet
            sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        late, transport = Answer("GET"), _Closed()
        late.close()
        late.connection_made(transport)  # type: ignore[arg-type]
        assert transport.closed

    run(work())


def test_no_more_is_read_than_the_client_reads() -> None:
    event = chunk(b"data: " + b"x" * 10_000 + b"\n\n")
    head = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"

    async def work() -> None:
        async with (
            answering(head, forever=event * 8) as (gw, sent),
            gw.client.post(gw.url + "/v1/stream") as answer,
        ):
            before = -1
            while before != sent[0]:  # until no buffer takes any more
                before = sent[0]
                await asyncio.sleep(0.5)
            assert 0 < before < 48 * 2**20
            await answer.content.readexactly(before)  # it goes on when the client reads
            while sent[0] == before:
                await asyncio.sleep(0.01)

    run(work(), 30.0)
