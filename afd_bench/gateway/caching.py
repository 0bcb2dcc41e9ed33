"""A stand-in for an attention instance with a prefix cache, for `afd bench routing`.

It computes the blocks of a prompt that it does not have, one prompt at a time, at a given speed,
and keeps the latest blocks. Its answers mean nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

BLOCK_TOKENS = 32


class PrefixCache:
    """Blocks of prompts, by all tokens up to their end; at most ``limit``, the latest used ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.asked = self.hit = 0  # tokens

    def compute(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens of a prompt are to be computed; then it is cached."""
        ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        names = [hash(tuple(prompt[:end])) for end in ends]
        found = 0
        while found < len(names) and names[found] in self._blocks:
            found += 1
        for name in reversed(names):  # so that the end of a prompt is dropped before its beginning
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)
        self.asked += len(prompt)
        self.hit += found * BLOCK_TOKENS
        return len(prompt) - found * BLOCK_TOKENS


@contextlib.asynccontextmanager
async def caching_instance(blocks: int, *, prefill_s: float, token_s: float) -> AsyncIterator[str]:
    """Serves /v1/completions with streams; yields its URL.

    prefill_s: seconds per token of a prompt. token_s: per token of an answer.
    """
    cache = PrefixCache(blocks)
    prefill = asyncio.Lock()

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            text="# TYPE vllm:prefix_cache_queries counter\n"
            f"vllm:prefix_cache_queries_total {cache.asked}\n"
            "# TYPE vllm:prefix_cache_hits counter\n"
            f"vllm:prefix_cache_hits_total {cache.hit}\n"
        )

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        async with prefill:
            await asyncio.sleep(cache.compute(body["prompt"]) * prefill_s)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices":[{"index":0,"text":"x"}]}\n\n')
            await asyncio.sleep(token_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=2**24)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{site.port}"
    finally:
        await runner.cleanup()
