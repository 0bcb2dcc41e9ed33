"""A stand-in for the API server of an attention instance: streams that cost almost nothing to send.

Every POST is answered like a streaming chat completion by vLLM behind uvicorn: one HTTP chunk and
one send per event. The query of the URL says how many tokens and how fast: ``?tokens=64&rate=20``.
One thread with epoll, so that on few cores most of the time is left for what is measured.

Prints the port once it listens. Run as ``python -m afd_bench.gateway.upstream``.
"""

from __future__ import annotations

import contextlib
import heapq
import select
import socket
import time
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

_EVENT = (
    b'data: {"id":"chatcmpl-3f0c2a9d7b1e4c55","object":"chat.completion.chunk","created":1790000,'
    b'"model":"demo","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}]}\n\n'
)
_PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n\r\n"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: stand-in\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """Returns ``data`` as one chunk of an HTTP body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = chunk(_EVENT)
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    received: bytes = b""
    left: int = 0  # events of the running stream
    period_s: float = 0.0


class Upstream:
    """Serves on ``listener`` until the process ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: dict[int, _Connection] = {}
        self._due: list[tuple[float, int, _Connection]] = []  # moment, number, where
        self._number = 0
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)

    def run(self) -> None:
        clock = time.monotonic
        while True:
            wait_s = max(0.0, self._due[0][0] - clock()) if self._due else 1.0
            for descriptor, _ in self._epoll.poll(wait_s):
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._read(self._connections[descriptor])
            now = clock()
            while self._due and self._due[0][0] <= now:
                moment, _, connection = heapq.heappop(self._due)
                self._send_event(connection, moment)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections[sock.fileno()] = _Connection(sock)
                self._epoll.register(sock, select.EPOLLIN)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        connection.received += data
        head, separator, body = connection.received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        if len(body) < length:
            return
        connection.received = body[length:]
        method, target, _ = head.split(b"\r\n", 1)[0].split(b" ")
        if method == b"POST":
            self._begin(connection, target.decode())
        else:
            self._send(connection, _PLAIN)

    def _begin(self, connection: _Connection, target: str) -> None:
        query = parse_qs(urlsplit(target).query)
        connection.left = int(query["tokens"][0])
        connection.period_s = 1 / float(query["rate"][0])
        self._send(connection, _HEAD)
        self._plan(connection, time.monotonic())

    def _plan(self, connection: _Connection, moment: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (moment, self._number, connection))

    def _send_event(self, connection: _Connection, moment: float) -> None:
        if not connection.left:  # closed meanwhile
            return
        connection.left -= 1
        if connection.left:
            self._send(connection, EVENT)
            self._plan(connection, moment + connection.period_s)
        else:
            self._send(connection, EVENT)
            self._send(connection, END)

    def _send(self, connection: _Connection, data: bytes) -> None:
        try:
            sent = connection.sock.send(data)
        except OSError:  # full: a reader that is this far behind is not part of any case
            sent = 0
        if sent != len(data):
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        connection.left = 0
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._epoll.unregister(connection.sock)
            connection.sock.close()


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    Upstream(listener).run()


if __name__ == "__main__":
    main()
