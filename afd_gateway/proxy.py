"""One request through the gateway: choose an instance, forward, go on elsewhere, relay."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from aiohttp import web

from afd_gateway.attempt import Refused, UpstreamLost, send
from afd_gateway.errors import GatewayError
from afd_gateway.headers import INSTANCE_HEADER
from afd_gateway.journal import JournalSpace
from afd_gateway.kept_answers import Keeper
from afd_gateway.owner import can_check_owners
from afd_gateway.pool import Lease, Pool
from afd_gateway.prefill import Prefiller, check_client
from afd_gateway.relay import Relay
from afd_gateway.replay import Departed, replay_of
from afd_gateway.settings import GatewaySettings
from afd_gateway.telemetry import Telemetry
from afd_gateway.trace import TRACE
from afd_gateway.upstreams import why_none

log = logging.getLogger("afd.gateway")


async def read_body(request: web.Request, limit: int) -> bytes:
    """Reads the whole body; GatewayError 413 as soon as it exceeds ``limit`` bytes."""
    too_large = GatewayError(
        413, f"the request body is larger than the gateway's limit of {limit} bytes"
    )
    if (request.content_length or 0) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


class Proxy:
    """Forwards requests."""

    def __init__(
        self,
        settings: GatewaySettings,
        pool: Pool,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._telemetry = telemetry
        self._own = settings.own_upstreams and can_check_owners()
        self._space = JournalSpace(settings.replay_bytes)
        self._prefiller = None
        if settings.prefill_urls or settings.prefill_ids:
            self._prefiller = Prefiller(settings, pool, telemetry, own=self._own)

    async def handle(
        self,
        request: web.Request,
        body: bytes,
        avoid: Collection[tuple[str, int, str]] = (),
        keeper: Keeper | None = None,
    ) -> web.StreamResponse:
        """Forwards ``request`` with its ``body`` to an attention instance. Raises GatewayError.

        avoid: keys of instances that cannot serve it. keeper: of its answer.
        """
        if (trace := request.get(TRACE)) is not None:
            trace.describe(body)
        if self._prefiller is not None:
            check_client(body)
        replay = replay_of(request.method, request.path, request.headers, body)
        relay = Relay(request, body, self._settings, replay, self._space, keeper)
        try:
            if keeper is not None and keeper.before is not None:
                whole = await relay.resume(keeper.before)
                if whole is not None:
                    return whole
            return await self._attempts(request, relay, avoid)
        finally:
            relay.close()

    async def _attempts(
        self, request: web.Request, relay: Relay, avoid: Collection[tuple[str, int, str]]
    ) -> web.StreamResponse:
        """Tries until the response is complete, or there is no use in trying again."""
        tried = set(avoid)
        deliveries = 0  # in a row, without a further token
        lost: UpstreamLost | None = None
        failed = "the connection of the client broke" if relay.begun else ""
        while (body := relay.next_body()) is not None:
            had = lost is not None and lost.delivered
            lease = await self._pool.acquire_soon(tried, body, begun=relay.begun, lost=had)
            if lease is None:
                return await self._nobody(relay, failed)
            if lost is not None:
                self._telemetry.retry(lost.cause, begun=relay.begun)
            tried.add(lease.upstream.key)
            moved = relay.moved
            try:
                with lease:
                    if self._prefiller is not None and lost is None and not relay.begun:
                        body = await self._prefiller.prepare(request, body)
                    return await self._forward(request, body, relay, lease)
            except Departed as error:
                words = f"{lease.upstream.id} cannot continue the answer: {error}"
                return await relay.fail(f"{failed}; {words}")
            except UpstreamLost as error:
                lost = error
            failed = f"{lease.upstream.id} failed while it answered: {lost.reason}"
            if self._pool.closed:
                return await self._nobody(relay, failed)
            self._pool.mark_failed(lease.upstream, lost.reason)
            if relay.moved > moved:  # so the request is not what instances fail at
                deliveries, tried = 0, {lease.upstream.key}
            deliveries += lost.delivered
            if deliveries >= self._settings.max_deliveries:
                return await self._give_up(relay, lost, failed, lease.upstream.id)
        return await relay.fail(f"{failed}; this answer cannot go on elsewhere")

    async def _forward(
        self, request: web.Request, body: bytes, relay: Relay, lease: Lease
    ) -> web.StreamResponse:
        """One attempt. Raises UpstreamLost and Departed."""
        trace = request.get(TRACE)
        if trace is None:
            return await self._attempt(request, body, relay, lease)
        with trace.attempt(lease.upstream.id) as attempt:
            body = attempt.body(body)
            return await self._attempt(request, body, relay, lease, attempt.headers)

    async def _attempt(
        self,
        request: web.Request,
        body: bytes,
        relay: Relay,
        lease: Lease,
        trace_headers: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        answer = await send(self._settings, request, body, lease, trace_headers, own=self._own)
        try:
            return await relay.pump(answer, lease)
        finally:
            answer.close()

    async def _nobody(self, relay: Relay, failed: str) -> web.StreamResponse:
        """Ends a request for which there is no instance. Raises GatewayError 503."""
        why = self._pool.closed or why_none(self._pool.views(), self._settings.expected_ids())
        if relay.begun:
            return await relay.fail(f"{failed}; {why}")
        raise GatewayError(503, why, {"Retry-After": str(self._settings.retry_after_s)})

    async def _give_up(
        self, relay: Relay, lost: UpstreamLost, failed: str, instance: str
    ) -> web.StreamResponse:
        """Ends a request that several instances failed. Raises GatewayError 502."""
        if relay.begun:
            return await relay.fail(failed, lost.answer if isinstance(lost.answer, bytes) else b"")
        if isinstance(lost.answer, Refused):
            refused = lost.answer
            return web.Response(status=refused.status, body=refused.body, headers=refused.headers)
        raise GatewayError(502, failed, {INSTANCE_HEADER: instance})
