"""Sends one request to an attention instance, on a connection of its own, and reads the answer.

aiohttp's client wakes a task for every read, which costs more than all the rest of an event. Here
the bytes of a stream go from the socket to the client's in one call.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

from afd_gateway.http_answer import AnswerHead, AnswerReader, Malformed
from afd_gateway.owner import check_owner

_HELD_BYTES = 2**18  # of a body that nobody has read yet; more is left in the socket
_SMALL = 2**16
_WITH_LENGTH = frozenset({"POST", "PUT", "PATCH"})

Sink = Callable[[bytes], None]
"""Gets the decoded bytes of a body as they arrive."""


class Broken(Exception):
    """The connection ended before the answer did."""


class Answer(asyncio.Protocol):
    """The answer to one request. Made by :func:`ask`.

    One coroutine at a time may wait for it.
    """

    def __init__(self, method: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader(method)
        self._parts: list[bytes] = []
        self._held = 0
        self._sink: Sink | None = None
        self._error: BaseException | None = None
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> AnswerHead:
        """Waits for the head. Raises Broken."""
        while (head := self._reader.head) is None:
            if self._error is not None:
                raise self._error
            await self._wait()
        return head

    async def next(self) -> bytes:
        """Returns the next bytes of the body, b"" at its end. Raises Broken if it ends early."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self._reader.ended:
                return b""
            await self._wait()
        data = b"".join(self._parts)
        self._parts, self._held = [], 0
        self.hold(False)
        return data

    async def pour(self, sink: Sink) -> None:
        """Gives the rest of the body to ``sink``, as it arrives. Returns at its end.

        Raises Broken if it ends early, and what ``sink`` raises.
        """
        if self._parts:
            data = b"".join(self._parts)
            self._parts, self._held = [], 0
            sink(data)
        self._sink = sink
        self.hold(False)
        try:
            while self._error is None and not self._reader.ended:
                await self._wait()
        finally:
            self._sink = None
        if self._error is not None:
            raise self._error

    def hold(self, paused: bool) -> None:
        """Stops reading from the socket, or goes on."""
        transport = self._transport
        if paused == self._paused or transport is None or transport.is_closing():
            return
        self._paused = paused
        (transport.pause_reading if paused else transport.resume_reading)()

    def close(self) -> None:
        """Ends the connection at once: vLLM aborts a request whose connection is gone."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(Broken("closed here"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        if self._error is not None:  # given up meanwhile
            self._transport.abort()

    def send(self, *parts: bytes) -> None:
        assert self._transport is not None
        for part in parts:
            self._transport.write(part)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        had_head = reader.head is not None
        try:
            body = reader.feed(data)
            if not body:
                pass
            elif self._sink is not None:
                self._sink(body)
            else:
                self._parts.append(body)
                self._held += len(body)
                if self._held > _HELD_BYTES:
                    self.hold(True)
                self._wake()
        except Malformed as error:
            self._give_up(Broken(str(error)))
        except Exception as error:  # of the sink; raised where the body is poured
            self._give_up(error)
        else:
            if reader.ended or (not had_head and reader.head is not None):
                self._wake()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._reader.close(whole=exc is None)
        if not self._reader.ended:
            self._fail(Broken("the connection was lost"))
        self._wake()

    def _give_up(self, error: BaseException) -> None:
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: BaseException) -> None:
        if self._error is None and not self._reader.ended:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


@functools.lru_cache(maxsize=256)
def _address(url: str) -> tuple[str, int, str]:
    """Returns (host, port, path in front of every target)."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80, parts.path.rstrip("/")


async def ask(
    api_url: str,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    connect_timeout_s: float,
    own: bool,
) -> Answer:
    """Sends a request and returns its answer, of which nothing may have arrived.

    own: the listener must be of this user, if it is on this host.

    Raises OSError if there is no connection, asyncio.TimeoutError after ``connect_timeout_s``,
    and ForeignListener.
    """
    host, port, prefix = _address(api_url)
    loop = asyncio.get_running_loop()
    answer = Answer(method)
    try:
        made = loop.create_connection(lambda: answer, host, port)
        transport, _ = await asyncio.wait_for(made, connect_timeout_s)
        if own:
            check_owner(transport.get_extra_info("peername"))
    except BaseException:
        answer.close()
        raise
    lines = [f"{method} {prefix}{target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if "Host" not in headers:
        lines.append(f"Host: {f'[{host}]' if ':' in host else host}:{port}")
    if body is not None or method in _WITH_LENGTH:
        lines.append(f"Content-Length: {len(body or b'')}")
    lines.append("Connection: close")
    if any("\r" in line or "\n" in line for line in lines):
        answer.close()
        raise ValueError("a line end inside a header")  # the server's parser lets none through
    head = "\r\n".join([*lines, "\r\n"]).encode("utf-8", "surrogateescape")
    if body is None or len(body) <= _SMALL:
        answer.send(head + (body or b""))
    else:
        answer.send(head, body)
    return answer
