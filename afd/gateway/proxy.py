"""One request through the gateway: choose an instance, forward, retry elsewhere, relay."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import hdrs, web

from afd.gateway.errors import GatewayError
from afd.gateway.headers import (
    INSTANCE_HEADER,
    request_headers,
    response_headers,
    upstream_url,
    wants_upgrade,
)
from afd.gateway.pool import Lease, Pool
from afd.gateway.settings import GatewaySettings
from afd.gateway.sse import DONE, EventSplitter, error_event
from afd.gateway.telemetry import Telemetry
from afd.gateway.upstreams import why_none

log = logging.getLogger("afd.gateway")

ANSWERED = web.RequestKey("answered", int)
"""Status of a stream whose last event has been passed on: a client may leave then."""


class UpstreamLost(Exception):
    """The upstream broke off. delivered: it may have seen the request. begun: its answer began."""

    def __init__(self, reason: str, *, delivered: bool, begun: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delivered = delivered
        self.begun = begun


async def read_body(request: web.Request, limit: int) -> bytes:
    """The whole body, at most ``limit`` bytes; GatewayError 413 beyond that, before reading on."""
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
    """Forwards requests over one client session, which pools its connections."""

    def __init__(
        self,
        settings: GatewaySettings,
        pool: Pool,
        telemetry: Telemetry,
        session: aiohttp.ClientSession,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._telemetry = telemetry
        self._session = session

    @staticmethod
    def make_session(settings: GatewaySettings) -> aiohttp.ClientSession:
        """A client that adds nothing, keeps nothing and waits for a healthy stream for ever."""
        return aiohttp.ClientSession(
            # One connection per request: a kept one that the server closes while we write looks
            # just like an instance that died with the request. limit=0: vLLM does the queueing.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer ``request`` from an attention instance. Raises GatewayError."""
        if wants_upgrade(request.headers):
            raise GatewayError(501, "the gateway forwards HTTP requests, not WebSocket connections")
        body = await read_body(request, self._settings.max_body_bytes)
        tried: set[tuple[str, int, str]] = set()
        deliveries = 0
        while (lease := self._pool.acquire(tried)) is not None:
            tried.add(lease.upstream.key)
            if len(tried) > 1:
                self._telemetry.retry()
            try:
                with lease:
                    return await self._forward(request, body, lease)
            except UpstreamLost as lost:
                if self._pool.closed:
                    break
                self._pool.mark_failed(lease.upstream, lost.reason)
                deliveries += lost.delivered
                if lost.begun or deliveries >= self._settings.max_deliveries:
                    raise GatewayError(
                        502,
                        f"{lease.upstream.id} failed while it answered: {lost.reason}",
                        {INSTANCE_HEADER: lease.upstream.id},
                    ) from None
        raise GatewayError(
            503,
            self._pool.closed or why_none(self._pool.views(), self._settings.expected_ids()),
            {"Retry-After": str(self._settings.retry_after_s)},
        )

    async def _forward(self, request: web.Request, body: bytes, lease: Lease) -> web.StreamResponse:
        """One attempt. Raises UpstreamLost only while nothing was sent to the client."""
        answer = await self._send(request, body, lease)
        try:
            lease.on_lost(answer.close)  # wakes the reader
            return await self._relay(request, answer, lease)
        except BaseException:
            answer.close()  # at once: vLLM aborts a request whose connection is gone
            raise
        finally:
            answer.release()

    async def _send(
        self, request: web.Request, body: bytes, lease: Lease
    ) -> aiohttp.ClientResponse:
        """Send the request and wait for the answer's head, however long the queue is."""
        attempt = asyncio.ensure_future(
            self._session.request(
                request.method,
                upstream_url(lease.upstream.api_url, request.rel_url),
                headers=request_headers(request.headers),
                # a file object, which aiohttp writes piece by piece
                data=io.BytesIO(body) if request.body_exists else None,
                allow_redirects=False,
            )
        )
        lease.on_lost(attempt.cancel)
        try:
            return await attempt
        except asyncio.CancelledError:
            if lease.lost_reason is None:
                attempt.cancel()
                raise  # the client is gone
            raise UpstreamLost(lease.lost_reason, delivered=True) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamLost(_words(error), delivered=False) from None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise UpstreamLost(_words(error), delivered=True) from None

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse, lease: Lease
    ) -> web.StreamResponse:
        # vLLM sends the head of a stream before the first token exists. Ours waits for the first
        # byte of the body, so that an instance lost in prefill costs a retry, not the request.
        chunks = _chunks(answer, lease)
        first = await anext(chunks, b"")
        encoded = answer.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity"
        is_sse = answer.content_type == "text/event-stream" and not encoded
        is_json = answer.content_type == "application/json"
        # JSON is sent once it is whole: a failure inside can then still be told with a status.
        data = await self._gather(first, chunks) if is_json else first
        response = web.StreamResponse(
            status=answer.status,
            reason=answer.reason,
            headers=response_headers(answer.headers, lease.upstream.id),
        )
        await response.prepare(request)
        events = EventSplitter() if is_sse else None
        try:
            while data:
                whole = events.feed(data) if events else data
                if whole:
                    await response.write(whole)
                if whole.endswith(DONE):
                    request[ANSWERED] = response.status
                data = await anext(chunks, b"")
        except UpstreamLost as lost:
            if not self._pool.closed:
                self._pool.mark_failed(lease.upstream, lost.reason)
            message = f"{lease.upstream.id} failed while it answered: {lost.reason}"
            log.warning("request %s: %s", request.path, message)
            if events is None:
                return _break_off(request, response)
            await response.write(error_event(502, message))
        except ConnectionError:
            raise  # the client's
        except Exception:  # a fault of ours, and it is too late for a status
            log.exception("request %s", request.path)
            return _break_off(request, response)
        else:
            if events is not None and (rest := events.flush()):
                await response.write(rest)
        with contextlib.suppress(ConnectionError):  # who has everything may leave
            await response.write_eof()
        return response

    async def _gather(self, first: bytes, chunks: AsyncIterator[bytes]) -> bytes:
        """The body up to its end, or up to the limit for a JSON answer held in memory."""
        parts, size = [first], len(first)
        try:
            while size <= self._settings.max_json_bytes and (part := await anext(chunks, b"")):
                parts.append(part)
                size += len(part)
        except UpstreamLost as lost:
            raise UpstreamLost(lost.reason, delivered=True, begun=True) from None
        return b"".join(parts)


async def _chunks(answer: aiohttp.ClientResponse, lease: Lease) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises UpstreamLost when it breaks off."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise UpstreamLost(lease.lost_reason or _words(error), delivered=True) from None


def _break_off(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """End a body that cannot be completed so that no client takes it for whole."""
    response.force_close()
    if request.transport is not None:
        request.transport.abort()
    return response


def _words(error: BaseException) -> str:
    """A reason for a person, without addresses of the inside."""
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return "connection refused" if refused else "cannot be reached"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection within the connect timeout"
    return "the connection was closed before the answer was complete"
