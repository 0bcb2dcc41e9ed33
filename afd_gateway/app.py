"""The aiohttp application: routes, errors in OpenAI's format, /health and request counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from afd.control.refusals import Refusals
from afd_gateway.admission import Admission, takes_a_turn
from afd_gateway.api_keys import ApiKeys
from afd_gateway.bodies import Bodies
from afd_gateway.comeback import REQUEST_ID, gone, wish_of
from afd_gateway.counts import Counts
from afd_gateway.errors import GatewayError, error_response
from afd_gateway.headers import request_headers, wants_upgrade
from afd_gateway.kept_answers import Answers, Keeper
from afd_gateway.kv_load import watch
from afd_gateway.owner import make_connector
from afd_gateway.pool import Pool
from afd_gateway.proxy import Proxy, read_body
from afd_gateway.relay import final_status
from afd_gateway.scrape import CONTENT_TYPE, metrics_page
from afd_gateway.settings import GatewaySettings
from afd_gateway.stored import others_than_holder, response_id
from afd_gateway.telemetry import Telemetry
from afd_gateway.upstreams import Provider, View, fleet_problem

log = logging.getLogger("afd.gateway")

FORWARDED = ("/v1/{tail:.*}", "/tokenize", "/detokenize", "/version", "/ping", "/openapi.json")
OPEN_PATHS = frozenset({"/health", "/ping"})
"""Answered without an API key: probes of an orchestrator or a load balancer have none."""
CleanupContext = Callable[[web.Application], AsyncIterator[None]]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """State of one running gateway."""

    def __init__(self, settings: GatewaySettings, provider: Provider, counts: Counts) -> None:
        self.settings = settings
        self.pool = Pool(settings, provider, counts)
        self.telemetry = Telemetry(settings.instance)
        self.bodies = Bodies(settings, self.telemetry.refused)
        self.keys = None
        if settings.api_keys is not None:
            self.keys = ApiKeys(
                settings.api_keys, settings.retry_after_s, self.telemetry.refused, counts=counts
            )
        self.admission = Admission(
            settings, counts, self.pool.room, self.pool.why_none, self.telemetry.refused
        )
        self.answers = None
        if settings.answers is not None and settings.resume_s > 0:
            self.answers = Answers(
                settings.answers, settings.process, settings.processes, keep_s=settings.resume_s
            )
        self.failures = Refusals(log)
        self.draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def own_page(self, peer_up: dict[str, bool]) -> str:
        """Returns the metrics of this process. peer_up: see Telemetry.text."""
        waiting = self.admission.waiting + self.pool.waiting
        return self.telemetry.text(self.pool.views(), peer_up, waiting)

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


def make_app(settings: GatewaySettings, provider: Provider, counts: Counts) -> web.Application:
    """Returns the application. It needs ``handler_cancellation``, as in afd_gateway.server."""
    gateway = Gateway(settings, provider, counts)
    middlewares: list[Middleware] = [_count, _shape_errors, _admit]
    cleanups: list[CleanupContext] = [_run_background]
    if settings.otlp is not None:
        from afd_gateway.spans import Spans  # needs an extra

        spans = Spans(settings.otlp, settings)
        middlewares.insert(1, spans.middleware)
        cleanups.append(spans.run)
    app = web.Application(middlewares=middlewares)
    app[GATEWAY] = gateway
    app.cleanup_ctx.extend(cleanups)
    app.router.add_get("/health", _health)
    if settings.metrics:
        app.router.add_get("/metrics", _metrics)
    for path in FORWARDED:
        app.router.add_route("*", path, _forward)
    return app


_PROXY = web.AppKey("proxy", Proxy)
_KEY_NAME = web.RequestKey("key_name", str)
_INNER = web.AppKey("inner", aiohttp.ClientSession)


async def _run_background(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    app[_PROXY] = Proxy(gateway.settings, gateway.pool, gateway.telemetry)
    async with aiohttp.ClientSession(
        connector=make_connector(own_upstreams=gateway.settings.own_upstreams)
    ) as inner:
        app[_INNER] = inner
        tasks = [asyncio.create_task(gateway.pool.probe_forever(inner))]
        if gateway.settings.routing == "prefix":
            tasks.append(asyncio.create_task(_watch_kv(gateway, inner)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if gateway.answers is not None:
                gateway.answers.close()


async def _watch_kv(gateway: Gateway, session: aiohttp.ClientSession) -> None:
    settings, pool = gateway.settings, gateway.pool
    await watch(
        session,
        pool.views,
        pool.kv_usage,
        interval_s=settings.kv_interval_s * settings.processes,
        deadline_s=settings.scrape_deadline_s,
    )


@web.middleware
async def _count(request: web.Request, handler: _Handler) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    gateway.begin()
    response = None
    try:
        response = await handler(request)
        return response
    finally:
        gateway.end()
        code = final_status(request, response)
        gateway.telemetry.request(request.method, request.path, code)


@web.middleware
async def _shape_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GatewayError as error:
        response = error_response(error)
        if error.status in (502, 503):
            request.app[GATEWAY].failures.note(
                f"{request.method} {request.path}: {error.status} {error}"
            )
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
    if REQUEST_ID in request.headers:
        response.headers[REQUEST_ID] = request.headers[REQUEST_ID]
    if request.app[GATEWAY].draining:
        response.force_close()
    return response


@web.middleware
async def _admit(request: web.Request, handler: _Handler) -> web.StreamResponse:
    keys = request.app[GATEWAY].keys
    if keys is None or request.path in OPEN_PATHS:
        return await handler(request)
    with keys.admit(request.headers) as key:
        request[_KEY_NAME] = key.name
        return await handler(request)


async def _forward(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    if gateway.draining:  # on a connection that was open before; the port is closed already
        raise GatewayError(
            503,
            "the gateway is shutting down",
            {"Retry-After": str(gateway.settings.retry_after_s)},
        )
    if wants_upgrade(request.headers):
        raise GatewayError(501, "the gateway forwards HTTP requests, not WebSocket connections")
    proxy = request.app[_PROXY]
    with gateway.bodies.hold(request):
        body = await read_body(request, gateway.settings.max_body_bytes)
        if not takes_a_turn(request):
            return await proxy.handle(request, body, await _not_holding(request, body))
        keeper = _keeper(request, body)
        if keeper is not None and keeper.before is not None and keeper.before.whole:
            return await proxy.handle(request, body, keeper=keeper)
        async with gateway.admission.turn(request.get(_KEY_NAME, "")):
            return await proxy.handle(request, body, await _not_holding(request, body), keeper)


def _keeper(request: web.Request, body: bytes) -> Keeper | None:
    """Returns the keeper of an answer that its client may come back for. Raises GatewayError."""
    answers = request.app[GATEWAY].answers
    if answers is None:
        return None
    # Without keys of the gateway, attention instances may check the client's header.
    client = request.get(_KEY_NAME, "") or request.headers.get(hdrs.AUTHORIZATION, "")
    wish = wish_of(request.method, request.path_qs, request.headers, body, client)
    if wish is None:
        return None
    keeper = Keeper(answers, wish)
    if keeper.before is None and wish.after:
        raise gone(wish)
    return keeper


async def _not_holding(request: web.Request, body: bytes) -> set[tuple[str, int, str]]:
    """Returns the keys of the instances that lack the stored response that a request refers to."""
    wanted = response_id(request, body)
    if wanted is None:
        return set()
    gateway = request.app[GATEWAY]
    settings = gateway.settings
    return await others_than_holder(
        request.app[_INNER],
        gateway.pool.views(),
        wanted,
        request_headers(request.headers, pass_credentials=settings.pass_credentials),
        settings.connect_timeout_s,
    )


async def _health(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    views, expected = gateway.pool.views(), gateway.settings.expected_ids()
    problem = "the gateway is shutting down" if gateway.draining else None
    problem = problem or fleet_problem(views, expected)
    by_id = {view.upstream.id: view for view in views}
    known = (name for name in by_id if not name.startswith("gateway-"))
    members = [_member(name, by_id.get(name)) for name in dict.fromkeys([*expected, *known])]
    body = {"status": "unavailable" if problem else "ok", "reason": problem, "members": members}
    return web.json_response(body, status=503 if problem else 200)


def _member(member_id: str, view: View | None) -> dict[str, str | int | None]:
    if view is None:
        return {"id": member_id, "state": "absent", "health": None, "generation": None}
    is_server = view.upstream.is_server
    return {
        "id": member_id,
        "state": view.upstream.state,
        "health": view.health.condition.value if is_server else None,
        "generation": view.upstream.generation,
    }


async def _metrics(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    text = await metrics_page(
        request.app[_INNER], gateway.settings, gateway.own_page, gateway.pool.views()
    )
    return web.Response(body=text.encode(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})
