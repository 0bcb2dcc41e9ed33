"""The client's side of one request: one response, whatever number of attempts fill it."""

from __future__ import annotations

import contextlib
import logging

import aiohttp
from aiohttp import hdrs, web

from afd_gateway.attempt import Chunks, Refused, UpstreamLost
from afd_gateway.errors import GatewayError
from afd_gateway.headers import response_headers
from afd_gateway.journal import Journal, JournalSpace
from afd_gateway.pool import Lease
from afd_gateway.replay import MAX_EVENT_BYTES, Continuation, Replay, Sent
from afd_gateway.settings import GatewaySettings
from afd_gateway.sse import DONE, EventSplitter, error_event, failure_in

log = logging.getLogger("afd.gateway")

ANSWERED = web.RequestKey("answered", int)
"""Status of a stream whose last event was forwarded; the client may disconnect after it."""
_CLIENT_GONE = 499  # appears in metrics and traces only
_SERVER_FAILED = frozenset({500, 502, 503, 504})
_NO_ROUTE = b'{"detail":"NotFound"}'
"""What vLLM's web server says of a path that it does not have, without blanks."""


def final_status(request: web.Request, response: web.StreamResponse | None) -> int:
    """Returns the HTTP status for metrics and traces. response: None if the handler raised."""
    return request.get(ANSWERED, _CLIENT_GONE) if response is None else response.status


class Relay:
    """Sends one response to the client.

    Args:
        replay: how a streamed answer goes on elsewhere; None: it cannot.
    """

    def __init__(
        self,
        request: web.Request,
        body: bytes,
        settings: GatewaySettings,
        replay: Replay | None,
        space: JournalSpace,
    ) -> None:
        self._request = request
        self._settings = settings
        self._replay = replay
        self._journal = Journal(space)
        self._continuation: Continuation | None = None
        self._response: web.StreamResponse | None = None
        self._is_sse = False
        self._body = body if replay is None else replay.first_body()
        self.moved = 0  # grows with what the client gets

    @property
    def begun(self) -> bool:
        """Whether the client has the beginning of a response."""
        return self._response is not None

    def close(self) -> None:
        self._journal.close()

    def next_body(self) -> bytes | None:
        """Returns the body of the next attempt; None: the response cannot go on."""
        if self._response is None:
            return self._body
        if self._replay is None or not self._journal.complete:
            return None
        sent = Sent.of(self._journal.events())
        self._continuation = Continuation(sent)
        return self._replay.next_body(sent)

    async def pump(self, answer: aiohttp.ClientResponse, lease: Lease) -> web.StreamResponse:
        """Forwards the answer of one attempt to its end.

        Raises GatewayError for a path that vLLM does not have, and UpstreamLost. If the response
        has begun then, only :meth:`pump` and :meth:`fail` may follow.
        """
        # vLLM sends the head of a stream before the first token. Wait for the first byte of the
        # body, so that a request whose instance dies in prefill gets an error status.
        chunks = Chunks(answer, lease)
        first = await chunks.next()
        encoded = answer.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity"
        is_sse = answer.content_type == "text/event-stream" and not encoded
        if self._response is not None and not (is_sse and answer.status == 200):
            refused = f"it answers {answer.status} to the rest of a request"
            raise UpstreamLost(refused, "error", delivered=True)
        if is_sse:
            return await self._pump_events(first, chunks, answer, lease)
        # JSON is sent once it is complete, so that the request can be repeated until then.
        data = first
        if answer.content_type == "application/json":
            data = await self._gather(first, chunks)
            if answer.status in _SERVER_FAILED and len(data) <= self._settings.max_json_bytes:
                failed = Refused(
                    answer.status, response_headers(answer.headers, lease.upstream.id), data
                )
                words = f"vLLM reported an error {answer.status}"
                raise UpstreamLost(words, "error", delivered=True, answer=failed)
            if answer.status == 404 and data.replace(b" ", b"") == _NO_ROUTE:
                raise GatewayError(
                    404,
                    f"{self._request.path} is not served, because the model generates text; use"
                    " /v1/chat/completions, /v1/completions or /v1/responses",
                )
        response = await self._begin(answer, lease)
        try:
            while data:
                await response.write(data)
                data = await chunks.next()
        except UpstreamLost as lost:
            log.warning("request %s: %s failed: %s", self._request.path, lease.upstream.id, lost)
            return self._break_off()
        return await self._end()

    async def fail(self, message: str, event: bytes = b"") -> web.StreamResponse:
        """Ends a begun response with one error. event: the upstream's own, if there is one."""
        assert self._response is not None
        log.warning("request %s: %s", self._request.path, message)
        if not self._is_sse:
            return self._break_off()
        await self._response.write(event or error_event(502, message))
        return await self._end()

    async def _begin(self, answer: aiohttp.ClientResponse, lease: Lease) -> web.StreamResponse:
        response = web.StreamResponse(
            status=answer.status,
            reason=answer.reason,
            headers=response_headers(answer.headers, lease.upstream.id),
        )
        await response.prepare(self._request)
        self._response, self._body = response, b""  # the first body is not needed again
        return response

    async def _pump_events(
        self,
        first: bytes,
        chunks: Chunks,
        answer: aiohttp.ClientResponse,
        lease: Lease,
    ) -> web.StreamResponse:
        self._is_sse = True
        if answer.status != 200:
            self._replay = None
        events = EventSplitter(MAX_EVENT_BYTES) if self._replay else EventSplitter()
        data, ended = first, False
        while data:
            whole = events.feed(data)
            failure = failure_in(whole) if whole else None
            if failure is not None:
                whole = whole[: failure.at]
            if whole:
                ended = whole.endswith(DONE)
                await self._forward(whole, answer, lease)
            if failure is not None:
                raise UpstreamLost(failure.reason, "error", delivered=True, answer=failure.event)
            try:
                data = await chunks.next()
            except UpstreamLost:
                if not ended:
                    raise
                data = b""  # the client has everything
        rest = events.flush()
        if self._replay is not None and not ended:
            raise UpstreamLost("the stream ended without its last event", "closed", delivered=True)
        response = self._response or await self._begin(answer, lease)
        if rest:
            await response.write(rest)
        return await self._end()

    async def _forward(self, events: bytes, answer: aiohttp.ClientResponse, lease: Lease) -> None:
        """Sends complete events."""
        response = self._response or await self._begin(answer, lease)
        if self._replay is not None:
            if self._continuation is not None:
                events = self._continuation.feed(events)
            if not events:
                return
            events = self._replay.kept_view(events)
            self._journal.add(events)
            events = self._replay.client_view(events)
        self.moved += len(events)
        if events:
            await response.write(events)
        if events.endswith(DONE):
            self._request[ANSWERED] = response.status

    async def _gather(self, first: bytes, chunks: Chunks) -> bytes:
        """Reads the body to its end, or up to ``max_json_bytes``."""
        parts, size = [first], len(first)
        while size <= self._settings.max_json_bytes and (part := await chunks.next()):
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    async def _end(self) -> web.StreamResponse:
        assert self._response is not None
        with contextlib.suppress(ConnectionError):  # the client has everything and may be gone
            await self._response.write_eof()
        return self._response

    def _break_off(self) -> web.StreamResponse:
        """Aborts the connection, so that no client takes an incomplete body for a complete one."""
        assert self._response is not None
        self._response.force_close()
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._response
