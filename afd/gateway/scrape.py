"""The /metrics page of the deployment: every member's page, fetched at once, and our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import aiohttp

from afd.gateway.exposition import Page, merge
from afd.gateway.settings import GatewaySettings
from afd.gateway.telemetry import Telemetry
from afd.gateway.upstreams import Upstream, View

log = logging.getLogger("afd.gateway")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ACCEPT = {"Accept": "text/plain;version=0.0.4"}  # no OpenMetrics: the merger reads this format


def targets(upstream: Upstream) -> tuple[str, ...]:
    """URLs of one member: vllm:* from its API server, afd_* from its worker."""
    api = (f"{upstream.api_url.rstrip('/')}/metrics",) if upstream.api_url else ()
    return api + ((upstream.metrics_url,) if upstream.metrics_url else ())


async def fetch_page(
    session: aiohttp.ClientSession, url: str, instance: str, deadline_s: float
) -> Page | None:
    """The page behind ``url``, or None if it could not be had within ``deadline_s`` seconds."""
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with session.get(url, timeout=timeout, headers=_ACCEPT) as answer:
            if answer.status != 200:
                log.debug("metrics of %s at %s: HTTP %d", instance, url, answer.status)
                return None
            return Page(await answer.text(encoding="utf-8"), instance)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
        # ValueError: not a URL, or not UTF-8
        log.debug("metrics of %s at %s: %r", instance, url, error)
        return None


async def metrics_page(
    session: aiohttp.ClientSession,
    settings: GatewaySettings,
    telemetry: Telemetry,
    views: Iterable[View],
) -> str:
    """One exposition of the whole deployment. Takes at most the scrape deadline, never raises."""
    views = tuple(views)
    wanted = [(view.upstream.id, url) for view in views for url in targets(view.upstream)]
    pages = await asyncio.gather(
        *(fetch_page(session, url, name, settings.scrape_deadline_s) for name, url in wanted)
    )
    up = dict.fromkeys(settings.expected_ids(), False)  # one that never joined is down, not absent
    up |= {view.upstream.id: bool(targets(view.upstream)) for view in views}
    for (name, _), page in zip(wanted, pages, strict=True):
        up[name] = up[name] and page is not None
    own = Page(telemetry.text(views, up))
    # In a thread: thousands of lines take tens of milliseconds, and streams must not stutter.
    return await asyncio.to_thread(merge, [own, *(page for page in pages if page is not None)])
