"""The load generator: streams that begin again as soon as they end, and what their clients see.

One thread with epoll, for the reason in upstream.py. Reads a Job as JSON from its standard input
and prints a Seen as JSON. Run as ``python -m afd_bench.gateway.clients``.
"""

from __future__ import annotations

import heapq
import json
import select
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import psutil

_BODY = json.dumps(
    {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "word " * 40}]}
).encode()
_LAST = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Job:
    """port: on 127.0.0.1. rate: tokens/s of a stream. warm_s: before the window of ``seconds``.
    watched: pids whose CPU time in the window is wanted. named: every request has an id."""

    port: int
    streams: int
    tokens: int
    rate: float
    warm_s: float
    seconds: float
    watched: tuple[int, ...] = ()
    named: bool = False


@dataclass(frozen=True)
class Seen:
    """Of the window. Times in ms. first_byte: from sending a request to its first event. gap:
    between two events of a stream. cpu_s: of the watched processes. own_cpu_s: of the clients."""

    events: int
    requests: int
    failed: int
    first_byte_p50_ms: float
    first_byte_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    cpu_s: float
    own_cpu_s: float


@dataclass(eq=False, slots=True)
class _Stream:
    sock: socket.socket | None = None
    sent: float = 0.0
    last: float = 0.0  # moment of the last event
    events: int = 0
    tail: bytes = b""


@dataclass(eq=False)
class _Counts:
    events: int = 0
    requests: int = 0
    failed: int = 0
    first: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which ``share`` of the values are; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Clients:
    """Runs one Job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        target = f"/v1/chat/completions?tokens={job.tokens}&rate={job.rate}"
        self._head = (
            f"POST {target} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(_BODY)}\r\n"
        ).encode()
        self._number = 0
        self._epoll = select.epoll()
        self._open: dict[int, _Stream] = {}
        self._due: list[tuple[float, int, _Stream]] = []
        self._counts = _Counts()

    def run(self) -> Seen:
        job, began = self._job, time.monotonic()
        spread_s = job.tokens / job.rate  # so that streams end, and begin again, evenly
        for number in range(job.streams):
            moment = began + spread_s * number / job.streams
            heapq.heappush(self._due, (moment, number, _Stream()))
        self._serve_until(began + spread_s + job.warm_s)
        self._counts = _Counts()
        before = [_cpu_s(pid) for pid in job.watched]
        own = time.process_time()
        end = time.monotonic() + job.seconds
        self._serve_until(end)
        own = time.process_time() - own
        cpu_s = sum(_cpu_s(pid) - then for pid, then in zip(job.watched, before, strict=True))
        c = self._counts
        return Seen(
            c.events, c.requests, c.failed,
            1e3 * percentile(c.first, 0.5), 1e3 * percentile(c.first, 0.99),
            1e3 * percentile(c.gaps, 0.5), 1e3 * percentile(c.gaps, 0.99),
            cpu_s, own,
        )  # fmt: skip

    def _serve_until(self, end: float) -> None:
        clock, poll, due = time.monotonic, self._epoll.poll, self._due
        while (now := clock()) < end:
            while due and due[0][0] <= now:
                self._begin(heapq.heappop(due)[2])
            wait_s = min(end, due[0][0] if due else end) - clock()
            for descriptor, _ in poll(max(0.0, wait_s)):
                self._read(self._open[descriptor])

    def _begin(self, stream: _Stream) -> None:
        stream.events, stream.tail, stream.sent = 0, b"", time.monotonic()
        try:
            if stream.sock is None:
                stream.sock = socket.create_connection(("127.0.0.1", self._job.port), timeout=10)
                stream.sock.setblocking(False)
                stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open[stream.sock.fileno()] = stream
                self._epoll.register(stream.sock, select.EPOLLIN)
            stream.sock.send(self._request())
        except OSError:
            self._fail(stream)

    def _request(self) -> bytes:
        self._number += 1
        name = b"X-Request-Id: r-%d\r\n" % self._number if self._job.named else b""
        return b"%b%b\r\n%b" % (self._head, name, _BODY)

    def _read(self, stream: _Stream) -> None:
        assert stream.sock is not None
        try:
            data = stream.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail(stream)
            return
        now = time.monotonic()
        seen = stream.tail[-2:] + data  # an event's end may be divided
        events = seen.count(b"}\n\n") + seen.count(b"]\n\n")
        if events:
            counts = self._counts
            counts.events += events
            if stream.events:
                counts.gaps.append(now - stream.last)
            else:
                counts.first.append(now - stream.sent)
            stream.events += events
            stream.last = now
        stream.tail = (stream.tail + data)[-len(_LAST) :] if len(data) < 64 else data[-len(_LAST) :]
        if stream.tail == _LAST:
            if stream.events == self._job.tokens + 1:
                self._counts.requests += 1
                self._begin(stream)
            else:
                self._fail(stream)

    def _fail(self, stream: _Stream) -> None:
        """Counts a failure and begins again a little later, on a new connection."""
        self._counts.failed += 1
        if stream.sock is not None:
            del self._open[stream.sock.fileno()]
            self._epoll.unregister(stream.sock)
            stream.sock.close()
            stream.sock = None
        heapq.heappush(self._due, (time.monotonic() + 0.1, id(stream), stream))


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    job = json.loads(sys.stdin.read())
    print(json.dumps(asdict(Clients(Job(**{**job, "watched": tuple(job["watched"])})).run())))


if __name__ == "__main__":
    main()
