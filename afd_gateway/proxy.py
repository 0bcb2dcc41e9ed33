"""One request through the gateway: choose an instance, forward, retry elsewhere, relay."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import AsyncIterator, Collection

import aiohttp
from aiohttp import hdrs, web

from afd_gateway.errors import GatewayError
from afd_gateway.headers import (
    INSTANCE_HEADER,
    request_headers,
    response_headers,
    upstream_url,
)
from afd_gateway.owner import ForeignListener, make_connector
from afd_gateway.pool import Lease, Pool
from afd_gateway.settings import GatewaySettings
from afd_gateway.sse import DONE, EventSplitter, error_event
from afd_gateway.telemetry import Telemetry
from afd_gateway.upstreams import why_none

log = logging.getLogger("afd.gateway")

ANSWERED = web.RequestKey("answered", int)
"""Status of a stream whose last event was forwarded; the client may disconnect after it."""


class UpstreamLost(Exception):
    """The upstream failed. delivered: it may have seen the request. begun: its response began."""

    def __init__(self, reason: str, *, delivered: bool, begun: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delivered = delivered
        self.begun = begun


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
    """Forwards requests over one HTTP client."""

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
        """Returns an HTTP client without added headers, cookies, reused connections or timeouts."""
        return aiohttp.ClientSession(
            # One connection per request: if a server closes a reused one during a write, it cannot
            # be told from an instance that died with the request. limit=0: vLLM queues.
            connector=make_connector(own_upstreams=settings.own_upstreams),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def handle(
        self,
        request: web.Request,
        body: bytes,
        avoid: Collection[tuple[str, int, str]] = (),
    ) -> web.StreamResponse:
        """Forwards ``request`` with its ``body`` to an attention instance. Raises GatewayError.

        avoid: keys of instances that cannot serve it.
        """
        tried = set(avoid)
        deliveries = 0
        while (lease := self._pool.acquire(tried, body)) is not None:
            tried.add(lease.upstream.key)
            if len(tried) > len(avoid) + 1:
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
        """One attempt. Raises UpstreamLost only before anything was sent to the client."""
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
        """Sends the request and waits for the response head, without a time limit."""
        attempt = asyncio.ensure_future(
            self._session.request(
                request.method,
                upstream_url(lease.upstream.api_url, request.rel_url),
                headers=request_headers(
                    request.headers, pass_credentials=self._settings.pass_credentials
                ),
                # aiohttp writes a file object in chunks
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
        except (
            aiohttp.ClientConnectorError,
            aiohttp.ConnectionTimeoutError,
            ForeignListener,
        ) as error:
            raise UpstreamLost(_words(error), delivered=False) from None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise UpstreamLost(_words(error), delivered=True) from None

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse, lease: Lease
    ) -> web.StreamResponse:
        # vLLM sends the head of a stream before the first token. Wait for the first byte of the
        # body, so that a request whose instance dies in prefill can be retried.
        chunks = _chunks(answer, lease)
        first = await anext(chunks, b"")
        encoded = answer.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity"
        is_sse = answer.content_type == "text/event-stream" and not encoded
        is_json = answer.content_type == "application/json"
        # JSON is sent once it is complete, so that a failure before still gets an error status.
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
        except Exception:  # a bug here; too late for an error status
            log.exception("request %s", request.path)
            return _break_off(request, response)
        else:
            if events is not None and (rest := events.flush()):
                await response.write(rest)
        with contextlib.suppress(ConnectionError):  # the client has everything and may be gone
            await response.write_eof()
        return response

    async def _gather(self, first: bytes, chunks: AsyncIterator[bytes]) -> bytes:
        """Reads the body to its end, or up to ``max_json_bytes``."""
        parts, size = [first], len(first)
        try:
            while size <= self._settings.max_json_bytes and (part := await anext(chunks, b"")):
                parts.append(part)
                size += len(part)
        except UpstreamLost as lost:
            raise UpstreamLost(lost.reason, delivered=True, begun=True) from None
        return b"".join(parts)


async def _chunks(answer: aiohttp.ClientResponse, lease: Lease) -> AsyncIterator[bytes]:
    """Yields the body as it arrives. Raises UpstreamLost if it ends early."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise UpstreamLost(lease.lost_reason or _words(error), delivered=True) from None


def _break_off(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Aborts the connection, so that no client takes an incomplete body for a complete one."""
    response.force_close()
    if request.transport is not None:
        request.transport.abort()
    return response


def _words(error: BaseException) -> str:
    """Returns the reason for an error message, without internal addresses."""
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return "connection refused" if refused else "cannot be reached"
    if isinstance(error, ForeignListener):
        return "another user listens at its port"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection within the connect timeout"
    return "the connection was closed before the answer was complete"
