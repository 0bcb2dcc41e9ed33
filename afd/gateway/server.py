"""Listening, serving and stopping: the gateway without the control plane."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Coroutine

from aiohttp import web

from afd.errors import ConfigError
from afd.gateway.app import GATEWAY, Gateway, make_app
from afd.gateway.settings import GatewaySettings
from afd.gateway.upstreams import Provider

log = logging.getLogger("afd.gateway")

_BACKLOG = 1024
_LAST_WORDS_S = 2.0  # for requests that were given up to tell their clients so


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Call it before anything else is started.

    Raises ConfigError if the address cannot be had, naming the cause and the setting.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"gateway: {host} is not a host name or address of this machine ({error.strerror});"
            " set gateway.host"
        ) from None
    # One socket, so IPv4 where there is a choice: "localhost" is meant as 127.0.0.1.
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    family, kind, proto, _, address = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # claims the port: bind alone lets a second process in
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


class GatewayServer:
    """A gateway that serves. Make it with ``await start_gateway(...)``."""

    def __init__(
        self, gateway: Gateway, runner: web.AppRunner, site: web.SockSite, url: str
    ) -> None:
        self.gateway = gateway
        self.url = url
        self._runner = runner
        self._site = site

    def members_changed(self) -> None:
        """Look at the provider now. On the loop's thread only."""
        self.gateway.pool.refresh()

    async def stop(self, drain_s: float, hurry: asyncio.Event | None = None) -> bool:
        """Close the port, let running requests finish for ``drain_s`` seconds, end the rest.

        hurry: set it to stop waiting. Returns whether every request finished by itself. A second
        call does nothing.
        """
        if self.gateway.draining:
            return True
        self.gateway.draining = True
        await self._site.stop()
        finished = await _unless(hurry, self.gateway.wait_idle(drain_s))
        if not finished:
            log.warning("ending the requests that still run")
            self.gateway.pool.close("the gateway is shutting down")
            await self.gateway.wait_idle(_LAST_WORDS_S)
        await self._runner.cleanup()
        return finished


async def _unless(hurry: asyncio.Event | None, work: Coroutine[None, None, bool]) -> bool:
    """The result of ``work``, or False as soon as ``hurry`` is set."""
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
    """Serve on ``listener`` (see ``bind_listener``), with the members that ``provider`` gives."""
    app = make_app(settings, provider)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that goes away ends its upstream request
        auto_decompress=False,  # bodies pass unchanged
        access_log=logging.getLogger("afd.gateway.access") if settings.access_log else None,
        shutdown_timeout=_LAST_WORDS_S,
    )
    await runner.setup()
    site = web.SockSite(runner, listener, backlog=_BACKLOG)
    await site.start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return GatewayServer(app[GATEWAY], runner, site, f"http://{shown}:{port}")
