"""Listening, serving and stopping; knows nothing of the control plane."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine

from aiohttp import web
from aiohttp.http import HttpProcessingError

from afd.control.refusals import Refusals
from afd.errors import ConfigError
from afd_gateway.accept import Acceptor
from afd_gateway.app import GATEWAY, Gateway, make_app
from afd_gateway.connection import ClientConnection
from afd_gateway.descriptors import connections_allowed_now
from afd_gateway.errors import GatewayError
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Provider

log = logging.getLogger("afd.gateway")

_BACKLOG = 1024
_LAST_WORDS_S = 2.0  # for requests that were given up to send their error


def bind_listener(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 picks a free port. Call it before starting anything.

    Raises ConfigError if the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"gateway: {host} is not a host name or address of this machine ({error.strerror});"
            " set gateway.host"
        ) from None
    # One socket, so prefer IPv4: "localhost" is 127.0.0.1.
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    family, kind, proto, _, address = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(
            _BACKLOG
        )  # reserves the port: after bind alone, a second process could bind too
    except OSError as error:
        listener.close()
        raise ConfigError(_cannot_listen(host, port, error)) from None
    listener.setblocking(False)
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"gateway: port {port} on {host} is in use; choose another with gateway.port or stop"
            " the process that holds it"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"gateway: {host} is not an address of this machine; set gateway.host"
    if error.errno == errno.EACCES:
        return (
            f"gateway: port {port} needs privileges that this user lacks; choose a gateway.port"
            " above 1023"
        )
    return f"gateway: cannot listen on port {port} of {host}: {error.strerror}; set gateway.port"


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
        self, gateway: Gateway, runner: web.AppRunner, acceptor: Acceptor, url: str
    ) -> None:
        self.gateway = gateway
        self.url = url
        self._runner = runner
        self._acceptor = acceptor

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
        await self._runner.cleanup()
        return finished


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
    settings: GatewaySettings, provider: Provider, listener: socket.socket
) -> GatewayServer:
    """Serves on ``listener`` (see ``bind_listener``) with the members from ``provider``."""
    app = make_app(settings, provider)
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
    acceptor.start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.tls is None else "https"
    return GatewayServer(gateway, runner, acceptor, f"{scheme}://{shown}:{port}")
