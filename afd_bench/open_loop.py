"""Sends requests at given moments, as `vllm bench serve` does, and times their streamed answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from afd.errors import AfdError
from afd_bench.workload import open_session

_VOCAB = 2000
_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Sent:
    """One request and its answer.

    arrival_s: seconds from the first request to its sending. prompt, output: tokens. ttft_s,
    e2el_s: seconds from its sending to its first and its last token, at the client.
    """

    arrival_s: float
    prompt: int
    output: int
    ttft_s: float
    e2el_s: float

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; NaN for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / (self.output - 1) if self.output > 1 else float("nan")


@dataclass(frozen=True)
class Planned:
    """A request to send ``at_s`` seconds after the start. prompt, output: tokens."""

    at_s: float
    prompt: int
    output: int


def poisson(
    rate: float, seconds: float, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> list[Planned]:
    """Returns rate * seconds requests with exponential gaps of 1 / rate seconds on average.

    prompt, output: least and most tokens; lengths are uniform between them.
    """
    draw = random.Random(seed)
    at, found = 0.0, []
    for _ in range(max(1, round(rate * seconds))):
        found.append(Planned(at, draw.randint(*prompt), draw.randint(*output)))
        at += draw.expovariate(rate)
    return found


def send(url: str, model: str, requests: Sequence[Planned]) -> list[Sent]:
    """Sends every request at its moment, whether or not earlier ones have been answered.

    Raises:
        AfdError: the server refused a request or did not answer in time.
    """
    return asyncio.run(_send(url, model, requests))


async def _send(url: str, model: str, requests: Sequence[Planned]) -> list[Sent]:
    salt = time.monotonic_ns()  # other prompts each time, so that no prefix is cached
    async with open_session() as session:
        start = time.monotonic()

        async def one(index: int, request: Planned) -> tuple[float, Sent]:
            await asyncio.sleep(start + request.at_s - time.monotonic())
            first = 5 + (salt + index * 7919) % _VOCAB
            prompt = [5 + (first + at * 31) % _VOCAB for at in range(request.prompt)]
            return await _stream(session, url, model, prompt, request)

        done = await asyncio.gather(*(one(i, request) for i, request in enumerate(requests)))
    origin = min(sent_at for sent_at, _ in done)
    return [
        Sent(sent_at - origin, sent.prompt, sent.output, sent.ttft_s, sent.e2el_s)
        for sent_at, sent in done
    ]


async def _stream(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], request: Planned
) -> tuple[float, Sent]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent_at = time.monotonic()
    first = last = 0.0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise AfdError(f"{url} returned {answer.status}: {await answer.text()}; see its log")
        async for line in answer.content:
            if line.startswith(_DATA) and _DONE not in line:
                last = time.monotonic()
                first = first or last
    if not first:
        raise AfdError(f"{url} answered without a token; see its log")
    return sent_at, Sent(0.0, len(prompt), request.output, first - sent_at, last - sent_at)
