"""Holds a steady decode load on one server and measures it with the server's counters."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

from afd.errors import AfdError, DeadlineExceeded
from afd_bench.servers import Server
from afd_bench.stages import Totals, totals
from afd_bench.workload import FIRST_TOKEN, kept_running

_POLL_S = 0.1
_READY_S = 120.0
_EACH_FIRST = 3  # mean tokens per request before a window opens


@dataclass(frozen=True)
class Load:
    """A decode load.

    requests: at a time. prompt: tokens per prompt. length: most tokens of a request on the server.
    vocab: token ids are below it. mixed: prompts have half to one and a half times ``prompt``
    tokens, evenly distributed.
    """

    requests: int
    prompt: int
    length: int
    vocab: int
    seed: int = 1
    mixed: bool = False

    def prompt_tokens(self, index: int) -> int:
        """Returns the tokens of the prompt of request ``index``."""
        if not self.mixed:
            return self.prompt
        return int(self.prompt * (0.5 + random.Random(f"{self.seed} {index} length").random()))

    def body(self, server: Server, index: int, tokens: int | None = None) -> dict[str, object]:
        """Returns the body of a /v1/completions request, with the same prompt for every server.

        tokens: of the answer; None: as many as ``length`` allows.
        """
        draw, prompt = random.Random(f"{self.seed} {index}"), self.prompt_tokens(index)
        return {
            "model": server.model,
            "prompt": draw.choices(range(FIRST_TOKEN, self.vocab), k=prompt),
            "max_tokens": tokens or self.length - prompt - 1,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": f"{time.monotonic_ns()}",  # no prefix-cache hits from earlier requests
        }


@dataclass(frozen=True)
class Steady:
    """One measured window.

    tokens_per_s: of all requests. tpot_s: seconds per token of a request. seconds: length of the
    window. answered: tokens of a request's answer in the middle of the window, on average.
    device_s: device time of a step of ours, if it replays graphs, else 0.
    """

    tokens_per_s: float
    tpot_s: float
    seconds: float
    answered: float
    device_s: float = 0.0


def steady(server: Server, load: Load, window_s: float) -> Steady:
    """Holds the load in decode for ``window_s`` seconds and measures it.

    Raises:
        AfdError: the requests did not all run together, or ended inside the window.
    """
    return asyncio.run(_steady(server, load, window_s))


async def _steady(server: Server, load: Load, window_s: float) -> Steady:
    async with held(server, load) as before:
        first = await read(server)
        await asyncio.sleep(window_s)
        last = await read(server)
    return rate(before, first, last, load.requests)


def rate(before: Totals, first: Totals, last: Totals, requests: int) -> Steady:
    """Returns the rates between two readings. Raises AfdError unless all requests still run.

    before: a reading before the first request.
    """
    if last.running != requests:
        raise AfdError(
            f"only {last.running:.0f} of {requests} requests ran until the end of the window; raise"
            " --answer or lower --window"
        )
    seconds = (last.moment_ns - first.moment_ns) / 1e9
    tokens = last.generated - first.generated
    if tokens <= 0:
        raise AfdError("no token was generated in the window; raise --window")
    return Steady(
        tokens / seconds,
        requests * seconds / tokens,
        seconds,
        answered(before, first, last, requests),
        device_step_s(first, last),
    )


def answered(before: Totals, first: Totals, last: Totals, requests: int) -> float:
    """Returns the mean tokens of a request's answer midway between the last two readings.

    A step's attention reads them too, so a prediction takes prompt and answer.
    """
    return ((first.generated + last.generated) / 2 - before.generated) / requests


def device_step_s(first: Totals, last: Totals) -> float:
    """Returns the mean device seconds of the steps replayed between two readings, else 0."""
    steps = last.replayed - first.replayed
    return (last.replayed_s - first.replayed_s) / steps if steps else 0.0


@contextlib.asynccontextmanager
async def held(server: Server, load: Load) -> AsyncIterator[Totals]:
    """Holds all requests in decode inside the block and cancels them at its end.

    Yields a reading from before the first request.
    """
    await quiet(server)
    before = await read(server)
    async with client() as session:
        tasks = [
            asyncio.create_task(complete(session, server, load.body(server, index), index))
            for index in range(load.requests)
        ]
        async with kept_running(tasks):
            await _await_decode(server, load, tasks, before)
            yield before
    await quiet(server)


async def _await_decode(
    server: Server, load: Load, tasks: list[asyncio.Task[None]], before: Totals
) -> None:
    end = time.monotonic() + _READY_S
    while True:
        now = await read(server)
        if now.running == load.requests and (
            now.generated - before.generated >= _EACH_FIRST * load.requests
        ):
            return
        for task in tasks:
            if task.done():
                await task
                raise AfdError(
                    f"a request ended before all {load.requests} ran; raise --answer or lower the"
                    " batch"
                )
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"only {now.running:.0f} of {load.requests} requests ran after {_READY_S:g} s;"
                " lower the batch or raise --kv-gib"
            )
        await asyncio.sleep(_POLL_S)


async def quiet(server: Server) -> None:
    """Waits until no request runs: cancelled requests stay in the batch for a step or two."""
    end = time.monotonic() + _READY_S
    while (await read(server)).running:
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"cancelled requests still run after {_READY_S:g} s; see {server.log}"
            )
        await asyncio.sleep(_POLL_S)


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def complete(
    session: aiohttp.ClientSession, server: Server, body: dict[str, object], index: int
) -> None:
    """Sends request number ``index`` and discards its answer. Raises AfdError."""
    async with _posted(session, server, body, index) as answer:
        await answer.read()


async def moments(
    session: aiohttp.ClientSession, server: Server, body: dict[str, object], index: int
) -> list[float]:
    """Returns the arrival time of each chunk of a streamed answer, in s. Raises AfdError."""
    times = []
    async with _posted(session, server, {**body, "stream": True}, index) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                if b'"error"' in line and "error" in json.loads(line[6:]):
                    text = line.decode().strip()
                    raise AfdError(f"{server.url} ended a stream with {text}; see {server.log}")
    return times


@contextlib.asynccontextmanager
async def _posted(
    session: aiohttp.ClientSession, server: Server, body: dict[str, object], index: int
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Posts a completion and yields the response.

    Raises:
        AfdError: the server failed; callers then continue with the other servers.
    """
    url = f"{server.url}/v1/completions"
    # vLLM's balancer distributes unevenly, and all ranks wait for the one with the most rows.
    rank = {"X-data-parallel-rank": str(index % server.ranks)} if server.ranks else {}
    try:
        async with session.post(url, json=body, headers=rank) as answer:
            if answer.status != 200:
                text = " ".join((await answer.text()).split())
                raise AfdError(
                    f"{server.url} returned {answer.status}: {text[:500]}; see {server.log}"
                )
            yield answer
    except aiohttp.ClientError as err:
        raise AfdError(f"{server.url} dropped a request ({err!r}); see {server.log}") from None


async def read(server: Server, depth: int | None = None) -> Totals:
    """Reads the server's counters. Raises AfdError.

    depth: see :func:`totals`.
    """
    try:
        exposition = await asyncio.to_thread(server.metrics)
    except OSError as err:
        raise AfdError(f"{server.url} serves no metrics ({err}); see {server.log}") from None
    return totals(exposition, time.monotonic_ns(), depth)
