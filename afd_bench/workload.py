"""Request sets that exercise the scheduler of a server, and a client that runs them.

A set is determined by its seed.

- ``mixed``: prompts of mixed length that arrive while others decode, and a group with one long
  prefix of which some arrive together and some later. With a small KV cache the scheduler also
  preempts.
- ``followers``: requests that read a prefix in the same step in which another request writes it.
  Splitting such a step into micro-batches gives wrong results; reads_block_written_in_step in
  afd/schedule.py prevents the split, and this set tests it.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import aiohttp

from afd.errors import AfdError

FIRST_TOKEN = 16  # smaller ids are the tokenizer's special tokens
DEADLINE_S = 180.0
_EDGES = (3, 200, 31, 32, 33, 64)  # shortest, longest, and around the KV block size of 32
_PREFIX = 96
_TOGETHER, _LATER = 5, 3
_ANSWER = (12, 40)
_LONG_PREFIX = 192


@dataclass(frozen=True)
class Request:
    """prompt: token ids. new_tokens: tokens to generate. arrival_s: seconds after the start."""

    prompt: tuple[int, ...]
    new_tokens: int
    arrival_s: float


@dataclass(frozen=True)
class Answer:
    """tokens: generated ids. gaps: per token, lead of the best log-probability over the second."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def mixed(seed: int, *, vocab: int, count: int = 32, spread_s: float = 0.3) -> tuple[Request, ...]:
    """Returns ``count`` requests that arrive within ``spread_s`` seconds, determined by ``seed``.

    Raises:
        ValueError: ``count`` is smaller than the fixed part of the set.
    """
    fixed = len(_EDGES) + _TOGETHER + _LATER
    if count < fixed:
        raise ValueError(f"a set needs at least {fixed} requests, not {count}")
    draw = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_TOKEN, vocab) for _ in range(length))

    def request(prompt: tuple[int, ...], arrival_s: float) -> Request:
        return Request(prompt, draw.randint(*_ANSWER), round(arrival_s, 4))

    prefix = tokens(_PREFIX)
    requests = [request(tokens(length), 0.0) for length in _EDGES]
    requests += [
        request(prefix + tokens(draw.randint(1, 24)), spread_s / 4) for _ in range(_TOGETHER)
    ]
    requests += [
        request(prefix + tokens(draw.randint(1, 24)), draw.uniform(0.5, 1.0) * spread_s)
        for _ in range(_LATER)
    ]
    requests += [
        request(tokens(draw.randint(3, 120)), draw.uniform(0.0, spread_s))
        for _ in range(count - fixed)
    ]
    return tuple(requests)


def followers(seed: int, *, vocab: int, waves: int = 4) -> tuple[Request, ...]:
    """Returns ``waves`` of 11 requests, for servers whose step is smaller than the long prompt.

    A wave has six short requests, a long prompt, and four requests that share the long prompt's
    prefix and arrive during its prefill. By then the short ones have ended, so that the four take
    their places in the batch, before the long prompt.
    """
    draw = random.Random(seed)

    def tokens(shortest: int, longest: int) -> tuple[int, ...]:
        length = draw.randint(shortest, longest)
        return tuple(draw.randrange(FIRST_TOKEN, vocab) for _ in range(length))

    requests: list[Request] = []
    for wave in range(waves):
        start_s = 0.15 * wave
        prefix = tokens(_LONG_PREFIX, _LONG_PREFIX)
        requests += [Request(tokens(3, 8), draw.randint(2, 8), start_s) for _ in range(6)]
        requests.append(Request(prefix + tokens(3, 3), 10, start_s + 0.01))
        requests += [
            Request(prefix + tokens(1, 12), 10, start_s + 0.015 + 0.008 * i) for i in range(4)
        ]
    return tuple(requests)


def reordered(requests: Sequence[Request], seed: int) -> tuple[Request, ...]:
    """Returns the same requests in the same order with shuffled arrival times."""
    times = [request.arrival_s for request in requests]
    random.Random(seed).shuffle(times)
    return tuple(
        replace(request, arrival_s=time) for request, time in zip(requests, times, strict=True)
    )


def run(url: str, model: str, requests: Sequence[Request], *, salt: str) -> list[Answer]:
    """Sends every request at its arrival time; returns the answers in the order of ``requests``.

    Args:
        url: base URL of an OpenAI server, without /v1. model: its served name.
        salt: only requests with the same salt share vLLM's prefix cache. A new salt per run makes
            each run prefill its own prompts.

    Raises:
        AfdError: the server refused a request or did not answer within DEADLINE_S.
    """
    return asyncio.run(_run(url, model, requests, salt, at_once=True))


def run_sequentially(
    url: str, model: str, requests: Sequence[Request], *, salt: str
) -> list[Answer]:
    """As :func:`run`, but sends one request at a time, so that every step has one request."""
    return asyncio.run(_run(url, model, requests, salt, at_once=False))


async def _run(
    url: str, model: str, requests: Sequence[Request], salt: str, *, at_once: bool
) -> list[Answer]:
    async with open_session() as session:
        if not at_once:
            return [await _complete(session, url, model, request, salt) for request in requests]

        async def arrive(request: Request) -> Answer:
            await asyncio.sleep(request.arrival_s)
            return await _complete(session, url, model, request, salt)

        return list(await asyncio.gather(*map(arrive, requests)))


def open_session() -> aiohttp.ClientSession:
    """Returns an HTTP client without a connection limit; the workload decides the concurrency.

    The client closes idle connections before the server does (uvicorn: after 5 s), because a
    request on a connection that is closing would be lost.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=DEADLINE_S)
    )


async def _complete(
    session: aiohttp.ClientSession, url: str, model: str, request: Request, salt: str
) -> Answer:
    body = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,  # two tokens with equal text would share an entry
        "cache_salt": salt,
    }
    choice = await post_completion(session, url, body)
    answer = parse_answer(choice)
    if len(answer.tokens) != request.new_tokens:
        raise AfdError(
            f"{url} generated {len(answer.tokens)} tokens instead of {request.new_tokens}; see its"
            " log"
        )
    return answer


async def post_completion(
    session: aiohttp.ClientSession, url: str, body: dict[str, object]
) -> dict[str, object]:
    """Returns the first choice of a /v1/completions response. Raises AfdError."""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                text = " ".join((await answer.text()).split())
                raise AfdError(f"{url} returned {answer.status}: {text[:500]}; see its log")
            data = await answer.json()
    except (aiohttp.ClientError, asyncio.TimeoutError) as err:
        raise AfdError(
            f"{url} did not complete a request within {DEADLINE_S:g} s ({err!r}); see its log"
        ) from None
    choice: dict[str, object] = data["choices"][0]
    return choice


@contextlib.asynccontextmanager
async def kept_running(tasks: Sequence[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Cancels the requests at the end of the block; raises the error of one that ended before."""
    try:
        yield
        for task in tasks:
            if task.done():
                await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def parse_answer(choice: dict[str, object]) -> Answer:
    """Returns the tokens and gaps of a completion's choice. Raises AfdError if one is missing."""
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, dict):
        raise AfdError("the server's answer has no token_ids or logprobs; use vLLM >= 0.26")
    gaps = []
    for entries in logprobs["top_logprobs"]:
        best = sorted(entries.values(), reverse=True)
        gaps.append(best[0] - best[1])
    return Answer(tuple(ids), tuple(gaps))


def matching(left: Sequence[Answer], right: Sequence[Answer]) -> float:
    """Returns the fraction of requests whose tokens are all equal, 0 to 1."""
    pairs = list(zip(left, right, strict=True))
    return sum(a.tokens == b.tokens for a, b in pairs) / len(pairs)


def first_difference(left: Answer, right: Answer) -> int | None:
    """Returns the index of the first different token, None if the answers are equal."""
    pairs = enumerate(zip(left.tokens, right.tokens, strict=True))
    return next((index for index, (a, b) in pairs if a != b), None)
