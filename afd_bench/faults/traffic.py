"""Clients that keep requests in flight and check every answer.

Each request is greedy and streamed, with one of a few prompts. The answers of an undisturbed round
are the reference, so a wrong token is noticed wherever it came from.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from afd.errors import AfdError
from afd_bench.workload import FIRST_TOKEN

REQUEST_S = 300.0
"""A request that takes longer has failed."""
_BACK_OFF_S = 0.2  # after a failure, so that a server that refuses everything is not flooded


@dataclass(frozen=True)
class Job:
    """One request: token ids of the prompt, tokens to generate, and the right answer."""

    prompt: tuple[int, ...]
    new_tokens: int
    answer: tuple[int, ...] = ()


@dataclass
class Counts:
    """What happened since the last reading.

    refused: 503 or 429 with Retry-After. cut: connections that broke and whose client came back.
    longest_s: longest time that a stream waited for its next token, or its first. reasons: of the
    failures, with their number.
    """

    done: int = 0
    failed: int = 0
    refused: int = 0
    wrong: int = 0
    cut: int = 0
    tokens: int = 0
    longest_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


def jobs(seed: int, count: int, *, vocab: int, new_tokens: tuple[int, int]) -> tuple[Job, ...]:
    """Returns ``count`` jobs with prompts of 5 to 60 tokens, determined by ``seed``."""
    draw = random.Random(seed)
    return tuple(
        Job(
            tuple(draw.randrange(FIRST_TOKEN, vocab) for _ in range(draw.randint(5, 60))),
            draw.randint(*new_tokens),
        )
        for _ in range(count)
    )


def answered(url: str, model: str, asked: Sequence[Job]) -> tuple[Job, ...]:
    """Returns the jobs with the answers of a server that nothing disturbs. Raises AfdError."""

    async def ask() -> list[tuple[int, ...]]:
        async with aiohttp.ClientSession(timeout=_timeout()) as session:
            counts = Counts()
            found = await asyncio.gather(*(_stream(session, url, model, j, counts) for j in asked))
        if any(len(answer) != job.new_tokens for answer, job in zip(found, asked, strict=True)):
            raise AfdError(f"{url} did not answer an undisturbed request in full; see its log")
        return found

    return tuple(
        Job(job.prompt, job.new_tokens, answer)
        for job, answer in zip(asked, asyncio.run(ask()), strict=True)
    )


class Traffic:
    """``clients`` requests in flight at any time, from a thread of its own. A context manager.

    Args:
        asked: with their answers. seed: of the order in which they are sent.
        limit: requests after which no new one is sent; None: until the block ends. comes_back: a
            client whose connection breaks asks for the rest of its answer (docs/gateway.md).
    """

    def __init__(
        self,
        url: str,
        model: str,
        asked: Sequence[Job],
        *,
        clients: int,
        seed: int,
        limit: int | None = None,
        comes_back: bool = False,
    ) -> None:
        self._url, self._model = url, model
        self._comes_back = comes_back
        self._jobs = tuple(asked)
        self._clients = clients
        self._draw = random.Random(seed)
        self._left = limit
        self._lock = threading.Lock()
        self._counts = Counts()
        self._running: set[int] = set()  # numbers of the requests under way
        self._sent = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Sends no new requests and waits for the running ones."""
        self._stop.set()
        self._thread.join(REQUEST_S + 10)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def read(self) -> Counts:
        """Returns what happened since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counts()
        return counts

    def settle(self, deadline_s: float = REQUEST_S) -> None:
        """Waits until every request that is under way now has ended."""
        with self._lock:
            before = set(self._running)
        end = time.monotonic() + deadline_s
        while before and time.monotonic() < end:
            time.sleep(0.02)
            with self._lock:
                before &= self._running

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        async with aiohttp.ClientSession(connector=connector, timeout=_timeout()) as session:
            await asyncio.gather(*(self._client(session) for _ in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self._stop.is_set():
            if self._left is not None:
                if self._left == 0:
                    return
                self._left -= 1
            job = self._draw.choice(self._jobs)
            own = Counts()
            with self._lock:
                number = self._sent = self._sent + 1
                self._running.add(number)
            ask = _asked_again if self._comes_back else _stream
            answer = await ask(session, self._url, self._model, job, own)
            whole = not own.failed and not own.refused
            own.done += whole
            own.wrong += whole and answer != job.answer
            self._add(own, number)
            if not whole:
                await asyncio.sleep(_BACK_OFF_S)

    def _add(self, own: Counts, number: int) -> None:
        with self._lock:
            self._running.discard(number)
            total = self._counts
            for name in ("done", "failed", "refused", "wrong", "cut", "tokens"):
                total.__dict__[name] += own.__dict__[name]
            total.longest_s = max(total.longest_s, own.longest_s)
            total.reasons.update(own.reasons)


def _timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=REQUEST_S)


@dataclass
class _Progress:
    """Of one request. last: number of the last event that arrived. at: when it did."""

    tokens: list[int] = field(default_factory=list)
    last: int = 0
    at: float = field(default_factory=time.monotonic)


async def _stream(
    session: aiohttp.ClientSession, url: str, model: str, job: Job, counts: Counts
) -> tuple[int, ...]:
    """Sends one request and reads its stream; returns the tokens. Failures go to ``counts``."""
    progress = _Progress()
    with _failures(progress, counts):
        await _read(session, url, model, job, {}, progress, counts)
    return tuple(progress.tokens)


async def _asked_again(
    session: aiohttp.ClientSession, url: str, model: str, job: Job, counts: Counts
) -> tuple[int, ...]:
    """The same, by a client that comes back for the rest when its connection breaks."""
    progress, name = _Progress(), uuid.uuid4().hex
    end = time.monotonic() + REQUEST_S
    with _failures(progress, counts):
        while True:
            headers = {"X-Request-Id": name, "Last-Event-ID": str(progress.last)}
            try:
                await _read(session, url, model, job, headers, progress, counts)
                break
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                if time.monotonic() > end:
                    raise
                counts.cut += 1
                await asyncio.sleep(_BACK_OFF_S)
    return tuple(progress.tokens)


@contextlib.contextmanager
def _failures(progress: _Progress, counts: Counts) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, asyncio.TimeoutError, AfdError, ValueError) as error:
        counts.failed += 1
        counts.longest_s = max(counts.longest_s, time.monotonic() - progress.at)
        counts.reasons[f"{type(error).__name__}: {error}"[:200]] += 1
    counts.tokens += len(progress.tokens)


async def _read(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    job: Job,
    headers: Mapping[str, str],
    progress: _Progress,
    counts: Counts,
) -> None:
    """Sends a request and reads its stream to the end.

    Raises:
        AfdError: the answer is an error, or lacks tokens. aiohttp.ClientError, ValueError.
    """
    body = {
        "model": model,
        "prompt": list(job.prompt),
        "max_tokens": job.new_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        if response.status != 200:
            text = " ".join((await response.text()).split())[:160]
            if response.status in (429, 503) and "Retry-After" in response.headers:
                counts.refused += 1
                counts.reasons[f"{response.status} {text}"] += 1
                return
            raise AfdError(f"{response.status} {text}")
        number = progress.last
        async for line in response.content:
            if line.startswith(b"id: "):
                number = int(line.removeprefix(b"id: "))
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise AfdError(str(event["error"])[:160])
            now = time.monotonic()
            counts.longest_s = max(counts.longest_s, now - progress.at)
            progress.at, progress.last = now, number
            for choice in event.get("choices", ()):
                progress.tokens += choice.get("token_ids") or []
    if len(progress.tokens) != job.new_tokens:
        missing = f"{len(progress.tokens)} of {job.new_tokens} tokens"
        raise AfdError(f"the stream ended after {missing}")
