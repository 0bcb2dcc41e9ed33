"""Accepts client connections up to a limit; refuses more with a 503 at once.

asyncio's own server accepts a whole backlog before it can refuse, and logs a traceback for each
accept without a free descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine

from afd.control.refusals import Refusals
from afd_gateway.descriptors import LINGERING
from afd_gateway.errors import error_body

log = logging.getLogger("afd.gateway")

_BATCH = 16  # connections accepted in one turn of the event loop: streams wait about 5 ms for them
_RETRY_S = 0.1  # pause after an accept that failed
_HANDSHAKE_S = 10.0
_LINGER_S = 1.0  # for a refused client to send its request and read the error


class Acceptor:
    """Accepts on one listener.

    Args:
        make: makes the protocol of a connection; it calls its argument when the connection ends.
        limit: open connections at most.
        tls: for HTTPS; None: plain HTTP. A refused client then gets no 503, only the end of its
            connection.
        refused: called with the reason for each refusal: "connections" or "descriptors".
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
        *,
        limit: int,
        retry_after_s: int,
        refused: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._limit = limit
        self._refused = refused
        self._tls = tls
        self._refusals = Refusals(log)
        self._tasks: set[asyncio.Task[None]] = set()
        self._lingering = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.open = 0
        body = error_body(503, "the gateway has no free connection; try again later")
        self._reply = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {retry_after_s}\r\n"
            "Connection: close\r\n\r\n"
        ).encode() + body

    def start(self) -> None:
        self._timer = None
        if self._closed:
            return
        self._loop.add_reader(self._listener.fileno(), self._ready)

    def close(self) -> None:
        """Closes the port; open connections stay. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _ready(self) -> None:
        for _ in range(_BATCH):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno == errno.EINVAL:  # the supervisor has shut the listener down
                    self._loop.remove_reader(self._listener.fileno())
                    return
                self._refused("descriptors")
                self._refusals.note(
                    f"cannot accept a connection: {error.strerror}; raise the limit of open files"
                )
                # The listener stays readable: without a pause this would be a busy loop.
                self._loop.remove_reader(self._listener.fileno())
                self._timer = self._loop.call_later(_RETRY_S, self.start)
                return
            client.setblocking(False)
            if self.open < self._limit:
                self.open += 1
                self._spawn(self._adopt(client))
            else:
                self._refuse(client)

    def _refuse(self, client: socket.socket) -> None:
        self._refused("connections")
        self._refusals.note(
            f"refused a connection: {self._limit} are open; raise the limit of open files"
        )
        if self._tls is not None:
            client.close()
            return
        with contextlib.suppress(OSError):
            client.send(self._reply)
            client.shutdown(socket.SHUT_WR)
            if self._lingering < LINGERING:
                self._lingering += 1
                self._spawn(self._linger(client))
                return
        client.close()

    async def _linger(self, client: socket.socket) -> None:
        """Reads until the client closes: closing first could discard the error unread."""
        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._discard(client), _LINGER_S)
        finally:
            client.close()
            self._lingering -= 1

    async def _discard(self, client: socket.socket) -> None:
        while await self._loop.sock_recv(client, 65536):
            pass

    async def _adopt(self, client: socket.socket) -> None:
        released = False

        def release() -> None:
            nonlocal released
            self.open -= not released
            released = True

        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(release),
                client,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
            )
        except OSError as error:
            client.close()
            release()
            log.debug("a new connection ended: %s", error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop keeps only a weak reference
        task.add_done_callback(self._tasks.discard)
