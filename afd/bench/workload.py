"""Request sets that put a server through what serving does to it, and a client that runs them.

A set is a function of its seed. ``mixed``: prompts of mixed length, arrivals while others decode,
and a group with one long prefix, of which some arrive together and some later; on a small KV cache
the scheduler also preempts. ``followers``: requests that start on a prefix which another one is
still writing, in the same step. Micro-batches get that wrong unless such a step stays unsplit (see
afd/schedule.py: reads_block_written_in_step): without that veto this set fails.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import aiohttp

from afd.errors import AfdError

FIRST_TOKEN = 16  # below it are the tokenizer's special tokens
DEADLINE_S = 180.0
_EDGES = (3, 200, 31, 32, 33, 64)  # shortest, longest, and around a KV block of 32
_PREFIX = 96
_TOGETHER, _LATER = 5, 3
_ANSWER = (12, 40)
_LEADER = 192


@dataclass(frozen=True)
class Request:
    """prompt: token ids. new_tokens: how many to generate. arrival_s: from the run's start."""

    prompt: tuple[int, ...]
    new_tokens: int
    arrival_s: float


@dataclass(frozen=True)
class Answer:
    """tokens: generated ids. gaps: per token, log-probability of the best over the second best."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def mixed(seed: int, *, vocab: int, count: int = 32, spread_s: float = 0.3) -> tuple[Request, ...]:
    """``count`` requests over ``spread_s`` seconds; the same seed gives the same set.

    Raises:
        ValueError: fewer requests than the fixed part of a set has.
    """
    fixed = len(_EDGES) + _TOGETHER + _LATER
    if count < fixed:
        raise ValueError(f"a set has at least {fixed} requests, {count} were asked")
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
    """``waves`` of 11 requests: a long prompt, four that share its prefix and come while it is
    being prefilled, and six short ones that have just ended, whose places in the batch, before the
    long prompt's, the four get. For servers that take less than the long prompt per step."""
    draw = random.Random(seed)

    def tokens(shortest: int, longest: int) -> tuple[int, ...]:
        length = draw.randint(shortest, longest)
        return tuple(draw.randrange(FIRST_TOKEN, vocab) for _ in range(length))

    requests: list[Request] = []
    for wave in range(waves):
        start_s = 0.15 * wave
        prefix = tokens(_LEADER, _LEADER)
        requests += [Request(tokens(3, 8), draw.randint(2, 8), start_s) for _ in range(6)]
        requests.append(Request(prefix + tokens(3, 3), 10, start_s + 0.01))
        requests += [
            Request(prefix + tokens(1, 12), 10, start_s + 0.015 + 0.008 * i) for i in range(4)
        ]
    return tuple(requests)


def reordered(requests: Sequence[Request], seed: int) -> tuple[Request, ...]:
    """The same requests in the same places, with their arrival times dealt out anew."""
    times = [request.arrival_s for request in requests]
    random.Random(seed).shuffle(times)
    return tuple(
        replace(request, arrival_s=time) for request, time in zip(requests, times, strict=True)
    )


def run(url: str, model: str, requests: Sequence[Request], *, salt: str) -> list[Answer]:
    """Send every request at its arrival time; answers in the order of ``requests``.

    Args:
        url: base of an OpenAI server, without /v1. model: its served name.
        salt: requests of one salt share vLLM's prefix cache, and with no other salt's, so that
            each run does its own prefill.

    Raises:
        AfdError: the server refused a request or did not answer within 180 s.
    """
    return asyncio.run(_run(url, model, requests, salt, at_once=True))


def run_sequentially(
    url: str, model: str, requests: Sequence[Request], *, salt: str
) -> list[Answer]:
    """As :func:`run`, one request at a time: every step has one request, on any server."""
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
    """A client without a limit on connections: how many requests wait is the workload's choice.

    It drops idle connections before the server does (uvicorn: after 5 s): a request sent into a
    connection that is being closed would be lost.
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
        "return_tokens_as_token_ids": True,  # else two tokens of one text would be one entry
        "cache_salt": salt,
    }
    choice = await post_completion(session, url, body)
    answer = parse_answer(choice)
    if len(answer.tokens) != request.new_tokens:
        raise AfdError(
            f"{url} generated {len(answer.tokens)} tokens where {request.new_tokens} were asked"
        )
    return answer


async def post_completion(
    session: aiohttp.ClientSession, url: str, body: dict[str, object]
) -> dict[str, object]:
    """The first choice of a /v1/completions answer. Raises AfdError naming what went wrong."""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                text = " ".join((await answer.text()).split())
                raise AfdError(f"{url} answered {answer.status}: {text[:500]}")
            data = await answer.json()
    except (aiohttp.ClientError, asyncio.TimeoutError) as err:
        raise AfdError(
            f"{url} did not complete a request within {DEADLINE_S:g} s ({err!r}); see its log"
        ) from None
    choice: dict[str, object] = data["choices"][0]
    return choice


@contextlib.asynccontextmanager
async def kept_running(tasks: Sequence[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Requests that run inside of the block and are given up at its end; one that ended before
    raises here why it did."""
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
    """Tokens and gaps of a completion's choice. Raises AfdError if either is missing."""
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, dict):
        raise AfdError("the server's answer has no token_ids or logprobs; it must be vLLM >= 0.26")
    gaps = []
    for entries in logprobs["top_logprobs"]:
        best = sorted(entries.values(), reverse=True)
        gaps.append(best[0] - best[1])
    return Answer(tuple(ids), tuple(gaps))


def matching(left: Sequence[Answer], right: Sequence[Answer]) -> float:
    """Fraction of requests whose tokens are all equal, 0 to 1."""
    pairs = list(zip(left, right, strict=True))
    return sum(a.tokens == b.tokens for a, b in pairs) / len(pairs)


def first_difference(left: Answer, right: Answer) -> int | None:
    """Index of the first token in which two answers differ; None if they are equal."""
    pairs = enumerate(zip(left.tokens, right.tokens, strict=True))
    return next((index for index, (a, b) in pairs if a != b), None)
