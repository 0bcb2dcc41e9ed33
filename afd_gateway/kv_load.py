"""How full the KV cache of each attention instance is, from vLLM's metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable

import aiohttp

from afd_gateway.owner import ForeignListener
from afd_gateway.upstreams import View

Key = tuple[str, int, str]

_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def usage_of(page: bytes) -> float | None:
    """Returns the largest share in use, 0 to 1, of the engines on a page; None without one."""
    found: list[float] = []
    for text in _USAGE.findall(page):
        try:
            found.append(float(text))
        except ValueError:
            continue
    return max(found, default=None)


async def watch(
    session: aiohttp.ClientSession,
    views: Callable[[], Iterable[View]],
    usage: dict[Key, float],
    *,
    interval_s: float,
    deadline_s: float,
) -> None:
    """Keeps ``usage`` current for as long as there is a choice of instances. Ends when cancelled.

    An instance whose page cannot be read has no usage.
    """
    timeout = aiohttp.ClientTimeout(total=deadline_s)

    async def ask(view: View) -> None:
        key, value = view.upstream.key, None
        try:
            url = f"{view.upstream.api_url.rstrip('/')}/metrics"
            async with session.get(url, timeout=timeout) as answer:
                if answer.status == 200:
                    value = usage_of(await answer.read())
        except (aiohttp.ClientError, ForeignListener, OSError, asyncio.TimeoutError):
            value = None
        if value is None:
            usage.pop(key, None)
        else:
            usage[key] = value

    while True:
        served = [view for view in views() if view.eligible]
        for key in usage.keys() - {view.upstream.key for view in served}:
            del usage[key]
        if len(served) > 1:
            await asyncio.gather(*map(ask, served))
        await asyncio.sleep(interval_s)
