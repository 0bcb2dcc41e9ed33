"""The /metrics page of the deployment: the pages of all members and the gateway's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import aiohttp

from afd_gateway.exposition import Page, merge
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Upstream, View

log = logging.getLogger("afd.gateway")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ACCEPT = {"Accept": "text/plain;version=0.0.4"}  # no OpenMetrics: the merger reads this format


def targets(upstream: Upstream) -> tuple[str, ...]:
    """Returns the metrics URLs of one member: vllm:* at its API server, afd_* at its worker."""
    api = (f"{upstream.api_url.rstrip('/')}/metrics",) if upstream.api_url else ()
    return api + ((upstream.metrics_url,) if upstream.metrics_url else ())


async def fetch_page(
    session: aiohttp.ClientSession, url: str, instance: str, deadline_s: float
) -> Page | None:
    """Fetches a page; None if that fails or takes more than ``deadline_s`` seconds."""
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with session.get(url, timeout=timeout, headers=_ACCEPT) as answer:
            if answer.status != 200:
                log.debug("metrics of %s at %s: HTTP %d", instance, url, answer.status)
                return None
            text = await answer.text(encoding="utf-8")
            # Other gateway processes name the instances of their samples themselves.
            return Page(text, None if instance.startswith("gateway-") else instance)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
        # ValueError: not a URL, or not UTF-8
        log.debug("metrics of %s at %s: %r", instance, url, error)
        return None


async def metrics_page(
    session: aiohttp.ClientSession,
    settings: GatewaySettings,
    own_page: Callable[[dict[str, bool]], str],
    views: Iterable[View],
) -> str:
    """Returns the metrics of all members. Takes at most the scrape deadline, never raises.

    own_page: returns this process's own metrics, given whether each member was scraped.
    """
    views = tuple(views)
    wanted = [(view.upstream.id, url) for view in views for url in targets(view.upstream)]
    pages = await asyncio.gather(
        *(fetch_page(session, url, name, settings.scrape_deadline_s) for name, url in wanted)
    )
    up = dict.fromkeys(
        settings.expected_ids(), False
    )  # an expected member that never joined is down
    up |= {view.upstream.id: bool(targets(view.upstream)) for view in views}
    for (name, _), page in zip(wanted, pages, strict=True):
        up[name] = up[name] and page is not None
    own = Page(own_page(up))
    # In a thread: thousands of lines take tens of milliseconds, which would delay streams.
    return await asyncio.to_thread(merge, [own, *(page for page in pages if page is not None)])
