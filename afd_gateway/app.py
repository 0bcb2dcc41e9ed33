"""The aiohttp application: routes, errors in OpenAI's format, /health and request counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import hdrs, web

from afd_gateway.api_keys import ApiKeys
from afd_gateway.bodies import Bodies
from afd_gateway.errors import GatewayError, error_response
from afd_gateway.owner import make_connector
from afd_gateway.pool import Pool
from afd_gateway.proxy import Proxy
from afd_gateway.relay import ANSWERED
from afd_gateway.scrape import CONTENT_TYPE, metrics_page
from afd_gateway.settings import GatewaySettings
from afd_gateway.telemetry import Telemetry
from afd_gateway.upstreams import Provider, View, fleet_problem

log = logging.getLogger("afd.gateway")

FORWARDED = ("/v1/{tail:.*}", "/tokenize", "/detokenize", "/version", "/ping", "/openapi.json")
OPEN_PATHS = frozenset({"/health", "/ping"})
"""Answered without an API key: probes of an orchestrator or a load balancer have none."""
_REQUEST_ID = "X-Request-Id"
_CLIENT_GONE = 499  # appears in metrics only
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """State of one running gateway."""

    def __init__(self, settings: GatewaySettings, provider: Provider) -> None:
        self.settings = settings
        self.pool = Pool(settings, provider)
        self.telemetry = Telemetry(settings.instance)
        self.bodies = Bodies(settings, self.telemetry.refused)
        self.keys = None
        if settings.api_keys is not None:
            self.keys = ApiKeys(settings.api_keys, settings.retry_after_s, self.telemetry.refused)
        self.draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        self._running += 1
        self._idle.clear()

    def end(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def wait_idle(self, deadline_s: float) -> bool:
        """Returns whether every request finished within ``deadline_s`` seconds."""
        if self._idle.is_set():  # wait_for with a timeout of 0 does not check
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        except asyncio.TimeoutError:
            return False
        return True


GATEWAY = web.AppKey("gateway", Gateway)


def make_app(settings: GatewaySettings, provider: Provider) -> web.Application:
    """Returns the application. It needs ``handler_cancellation``, as in afd_gateway.server."""
    gateway = Gateway(settings, provider)
    app = web.Application(middlewares=[_count, _shape_errors, _admit])
    app[GATEWAY] = gateway
    app.cleanup_ctx.append(_run_background)
    app.router.add_get("/health", _health)
    if settings.metrics:
        app.router.add_get("/metrics", _metrics)
    for path in FORWARDED:
        app.router.add_route("*", path, _forward)
    return app


_PROXY = web.AppKey("proxy", Proxy)
_INNER = web.AppKey("inner", aiohttp.ClientSession)


async def _run_background(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    # Two client sessions: probes and scrapes need other settings than requests.
    async with (
        Proxy.make_session(gateway.settings) as outer,
        aiohttp.ClientSession(
            connector=make_connector(own_upstreams=gateway.settings.own_upstreams)
        ) as inner,
    ):
        app[_PROXY] = Proxy(gateway.settings, gateway.pool, gateway.telemetry, outer)
        app[_INNER] = inner
        probing = asyncio.create_task(gateway.pool.probe_forever(inner))
        try:
            yield
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing


@web.middleware
async def _count(request: web.Request, handler: _Handler) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    gateway.begin()
    code = None
    try:
        response = await handler(request)
        code = response.status
        return response
    finally:
        gateway.end()
        if code is None:
            code = request.get(ANSWERED, _CLIENT_GONE)
        gateway.telemetry.request(request.method, request.path, code)


@web.middleware
async def _shape_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GatewayError as error:
        response = error_response(error)
        if error.status in (502, 503):
            log.warning("%s %s: %d %s", request.method, request.path, error.status, error)
    except web.HTTPNotFound:
        known = ", ".join(("/v1/*", *FORWARDED[1:], "/health and /metrics"))
        response = error_response(
            GatewayError(404, f"no such path: {request.path}; the gateway serves {known}")
        )
    except web.HTTPMethodNotAllowed as error:
        response = error_response(
            GatewayError(
                405,
                f"{request.path} does not allow {request.method}",
                {hdrs.ALLOW: ",".join(sorted(error.allowed_methods))},
            )
        )
    except ConnectionError:
        raise  # the client disconnected during a write
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        response = error_response(GatewayError(500, "internal error of the gateway; see its log"))
    if _REQUEST_ID in request.headers:
        response.headers[_REQUEST_ID] = request.headers[_REQUEST_ID]
    if request.app[GATEWAY].draining:
        response.force_close()
    return response


@web.middleware
async def _admit(request: web.Request, handler: _Handler) -> web.StreamResponse:
    keys = request.app[GATEWAY].keys
    if keys is None or request.path in OPEN_PATHS:
        return await handler(request)
    with keys.admit(request.headers):
        return await handler(request)


async def _forward(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    if gateway.draining:  # on a connection that was open before; the port is closed already
        raise GatewayError(
            503,
            "the gateway is shutting down",
            {"Retry-After": str(gateway.settings.retry_after_s)},
        )
    with gateway.bodies.hold(request):
        return await request.app[_PROXY].handle(request)


async def _health(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    views, expected = gateway.pool.views(), gateway.settings.expected_ids()
    problem = "the gateway is shutting down" if gateway.draining else None
    problem = problem or fleet_problem(views, expected)
    by_id = {view.upstream.id: view for view in views}
    members = [_member(name, by_id.get(name)) for name in dict.fromkeys([*expected, *by_id])]
    body = {"status": "unavailable" if problem else "ok", "reason": problem, "members": members}
    return web.json_response(body, status=503 if problem else 200)


def _member(member_id: str, view: View | None) -> dict[str, str | int | None]:
    if view is None:
        return {"id": member_id, "state": "absent", "health": None, "generation": None}
    is_server = view.upstream.role == "attention"
    return {
        "id": member_id,
        "state": view.upstream.state,
        "health": view.health.condition.value if is_server else None,
        "generation": view.upstream.generation,
    }


async def _metrics(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    text = await metrics_page(
        request.app[_INNER],
        gateway.settings,
        gateway.telemetry,
        gateway.pool.views(),
        gateway.pool.waiting,
    )
    return web.Response(body=text.encode(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})
