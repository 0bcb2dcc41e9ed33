"""Listening, serving and stopping; knows nothing of the control plane."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError

from afd.control.refusals import Refusals
from afd_gateway.accept import Acceptor
from afd_gateway.app import GATEWAY, Gateway, make_app
from afd_gateway.connection import ClientConnection
from afd_gateway.counts import Counts
from afd_gateway.descriptors import connections_allowed_now
from afd_gateway.errors import GatewayError
from afd_gateway.scrape import CONTENT_TYPE
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Provider

log = logging.getLogger("afd.gateway")

_LAST_WORDS_S = 2.0  # for requests that were given up to send their error


class _MalformedRequests(logging.Filter):
    """Replaces aiohttp's traceback for each malformed request by a line at a limited rate.

    Clients that disconnect are not logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._refusals = Refusals(log)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False
        if isinstance(error, GatewayError):  # a body that was given up; its request has a response
            return False
        # UnicodeError: aiohttp repeats an Expect header that it does not know in its reply.
        if not isinstance(error, (HttpProcessingError, UnicodeError)):
            return True
        # Not the error's words: they repeat parts of the request, which may hold a credential.
        self._refusals.note(f"refused a malformed request: {type(error).__name__}")
        return False


class GatewayServer:
    """A running gateway, made by ``await start_gateway(...)``."""

    def __init__(
        self,
        gateway: Gateway,
        runner: web.AppRunner,
        acceptor: Acceptor,
        url: str,
        own_metrics: OwnMetrics | None,
    ) -> None:
        self.gateway = gateway
        self.url = url
        self.metrics_url = own_metrics.url if own_metrics else f"{url}/metrics"
        self._own_metrics = own_metrics
        self._runner = runner
        self._acceptor = acceptor

    def accept(self) -> None:
        """Begins to accept connections. A second call does nothing."""
        self._acceptor.start()

    def members_changed(self) -> None:
        """Reads the members from the provider now. Call it on the event loop."""
        self.gateway.pool.refresh()

    async def stop(self, drain_s: float, hurry: asyncio.Event | None = None) -> bool:
        """Closes the port, waits ``drain_s`` seconds for running requests and ends the rest.

        hurry: set it to stop waiting. Returns whether all requests finished. A second call does
        nothing.
        """
        if self.gateway.draining:
            return True
        self.gateway.draining = True
        self._acceptor.close()
        finished = await _unless(hurry, self.gateway.wait_idle(drain_s))
        if not finished:
            log.warning("ending the requests that still run")
            self.gateway.pool.close("the gateway is shutting down")
            await self.gateway.wait_idle(_LAST_WORDS_S)
        if self._own_metrics is not None:
            await self._own_metrics.close()
        await self._runner.cleanup()
        return finished


class OwnMetrics:
    """The metrics of this process alone, for the other processes of the port, at a loopback port.

    A scrape of the common port reaches any of them, which then asks the others.
    """

    def __init__(self, runner: web.ServerRunner, url: str) -> None:
        self._runner = runner
        self.url = url

    @classmethod
    async def start(cls, gateway: Gateway) -> OwnMetrics:
        async def page(_: web.BaseRequest) -> web.StreamResponse:
            body = gateway.own_page({}).encode()
            return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

        runner = web.ServerRunner(web.Server(page))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return cls(runner, f"http://127.0.0.1:{site.port}/metrics")

    async def close(self) -> None:
        await self._runner.cleanup()


async def _unless(hurry: asyncio.Event | None, work: Coroutine[None, None, bool]) -> bool:
    """Returns the result of ``work``, or False as soon as ``hurry`` is set."""
    if hurry is None:
        return await work
    working, hurried = asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait({working, hurried}, return_when=asyncio.FIRST_COMPLETED)
        return working.done() and working.result()
    finally:
        working.cancel()
        hurried.cancel()


async def start_gateway(
    settings: GatewaySettings,
    provider: Provider,
    listener: socket.socket,
    counts: Counts | None = None,
    *,
    accept: bool = True,
) -> GatewayServer:
    """Serves on ``listener`` (see ``bind_listener``) with the members from ``provider``.

    counts: shared with the other processes of the port. accept: False leaves connections waiting
    until ``GatewayServer.accept``.
    """
    app = make_app(settings, provider, counts or Counts())
    # A logger of its own, so that the filter is this server's.
    http_log = logging.Logger("afd.gateway.http")
    http_log.parent = log
    http_log.addFilter(_MalformedRequests())
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that disconnects ends its upstream request
        shutdown_timeout=_LAST_WORDS_S,
    )
    await runner.setup()
    server, gateway = runner.server, app[GATEWAY]
    assert server is not None
    access_log = logging.getLogger("afd.gateway.access") if settings.access_log else None

    def connection(on_end: Callable[[], None]) -> ClientConnection:
        return ClientConnection(
            server,
            on_end=on_end,
            on_malformed=lambda: gateway.telemetry.refused("malformed"),
            on_slow=lambda: gateway.telemetry.refused("slow_client"),
            slow_s=settings.slow_client_s,
            loop=asyncio.get_running_loop(),
            logger=http_log,
            access_log=access_log,
            auto_decompress=False,  # bodies pass unchanged
            keepalive_timeout=settings.idle_timeout_s,
        )

    acceptor = Acceptor(
        listener,
        connection,
        limit=settings.max_connections or connections_allowed_now(),
        retry_after_s=settings.retry_after_s,
        refused=gateway.telemetry.refused,
        tls=settings.tls,
    )
    if accept:
        acceptor.start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.tls is None else "https"
    own = None
    if settings.processes > 1 and settings.metrics:
        own = await OwnMetrics.start(gateway)
    return GatewayServer(gateway, runner, acceptor, f"{scheme}://{shown}:{port}", own)
