"""The client's side of one request: one response, whatever number of attempts fill it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from aiohttp import hdrs, web
from multidict import CIMultiDict

from afd_gateway.answer import Answer
from afd_gateway.attempt import Chunks, Refused, UpstreamLost
from afd_gateway.comeback import REQUEST_ID, numbered, rest_of
from afd_gateway.connection import ClientConnection
from afd_gateway.errors import GatewayError
from afd_gateway.headers import response_headers
from afd_gateway.http_answer import AnswerHead
from afd_gateway.journal import Journal, JournalSpace
from afd_gateway.kept_answers import Head, Keeper, Kept
from afd_gateway.pool import Lease
from afd_gateway.replay import MAX_EVENT_BYTES, Continuation, Replay, Sent
from afd_gateway.settings import GatewaySettings
from afd_gateway.sse import DONE, EventSplitter, Failure, error_event, failure_in

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
        keeper: keeps the answer for a client that may come back.
    """

    def __init__(
        self,
        request: web.Request,
        body: bytes,
        settings: GatewaySettings,
        replay: Replay | None,
        space: JournalSpace,
        keeper: Keeper | None = None,
    ) -> None:
        self._request = request
        self._settings = settings
        self._replay = replay
        self._journal = Journal(space)
        self._keeper = keeper
        self._head: Head | None = None
        self._number = 0  # events that were sent to a client that wants their numbers
        self._continuation: Continuation | None = None
        self._response: web.StreamResponse | None = None
        self._chunked = False
        self._is_sse = False
        self._splitter = EventSplitter()
        self._ended = False  # the last event has come
        self._body = body if replay is None else replay.first_body()
        self.moved = 0  # grows with what the client gets

    @property
    def begun(self) -> bool:
        """Whether the client has the beginning of a response."""
        return self._response is not None

    def close(self) -> None:
        self._journal.close()
        if self._keeper is not None:
            self._keeper.close()

    async def resume(self, kept: Kept) -> web.StreamResponse | None:
        """Sends what the client lacks of an answer that was begun before.

        Returns the response if that is all of it. Raises GatewayError 410, see ``rest_of``.
        """
        assert self._keeper is not None and self._response is None
        head, headers = kept.head, CIMultiDict(kept.head.headers)
        if not head.streamed:
            return web.Response(status=head.status, body=kept.body, headers=headers)
        assert self._replay is not None
        events = self._replay.client_view(kept.body)
        rest, self._number = rest_of(events, self._keeper.wish)
        response = web.StreamResponse(status=head.status, headers=headers)
        if not kept.whole:
            self._keeper.stream(head, kept.body)
            self._journal.add(kept.body)
        await self._send_head(response)
        self._head, self._is_sse = head, True
        if rest:
            await response.write(rest)
        if not kept.whole:
            return None
        self._request[ANSWERED] = response.status
        return await self._end()

    def next_body(self) -> bytes | None:
        """Returns the body of the next attempt; None: the response cannot go on."""
        if self._response is None:
            return self._body
        if self._replay is None or not self._journal.complete:
            return None
        sent = Sent.of(self._journal.events())
        self._continuation = Continuation(sent)
        return self._replay.next_body(sent)

    async def pump(self, answer: Answer, lease: Lease) -> web.StreamResponse:
        """Forwards the answer of one attempt to its end.

        Raises GatewayError for a path that vLLM does not have, and UpstreamLost. If the response
        has begun then, only :meth:`pump` and :meth:`fail` may follow.
        """
        # vLLM sends the head of a stream before the first token. Wait for the first byte of the
        # body, so that a request whose instance dies in prefill gets an error status.
        chunks, head = Chunks(answer, lease), await answer.head()
        first = await chunks.next()
        is_sse = head.content_type == "text/event-stream" and not head.encoded
        if self._response is not None and not (is_sse and head.status == 200):
            refused = f"it answers {head.status} to the rest of a request"
            raise UpstreamLost(refused, "error", delivered=True)
        if is_sse:
            with self._flow(answer):
                return await self._pump_events(first, chunks, head, lease)
        # JSON is sent once it is complete, so that the request can be repeated until then.
        data = first
        if head.content_type == "application/json":
            data = await self._gather(first, chunks)
            if head.status in _SERVER_FAILED and len(data) <= self._settings.max_json_bytes:
                failed = Refused(
                    head.status, response_headers(head.headers, lease.upstream.id), data
                )
                words = f"vLLM reported an error {head.status}"
                raise UpstreamLost(words, "error", delivered=True, answer=failed)
            if head.status == 404 and data.replace(b" ", b"") == _NO_ROUTE:
                raise GatewayError(
                    404,
                    f"{self._request.path} is not served, because the model generates text; use"
                    " /v1/chat/completions, /v1/completions or /v1/responses",
                )
            if (
                self._keeper is not None
                and head.status == 200
                and len(data) <= self._settings.max_json_bytes
            ):
                headers = self._headers(head, lease)
                self._keeper.whole(Head(200, tuple(headers.items()), streamed=False), data)
        response = await self._begin(head, lease)
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

    async def _begin(self, head: AnswerHead, lease: Lease) -> web.StreamResponse:
        headers = self._headers(head, lease)
        response = web.StreamResponse(status=head.status, reason=head.reason, headers=headers)
        await self._send_head(response)
        if self._keeper is not None and self._replay is not None:
            self._head = Head(head.status, tuple(headers.items()), streamed=True)
        return response

    async def _send_head(self, response: web.StreamResponse) -> None:
        await response.prepare(self._request)
        self._request.writer.send_headers()  # aiohttp waits for the first bytes of the body
        self._chunked = hdrs.TRANSFER_ENCODING in response.headers
        self._response, self._body = response, b""  # the first body is not needed again

    def _headers(self, head: AnswerHead, lease: Lease) -> CIMultiDict[str]:
        headers = response_headers(head.headers, lease.upstream.id)
        if self._keeper is not None:
            headers.setdefault(REQUEST_ID, self._keeper.wish.request_id)
        return headers

    @contextlib.contextmanager
    def _flow(self, answer: Answer) -> Iterator[None]:
        """Reads no more of the answer than the client does."""
        connection = self._request.protocol
        assert isinstance(connection, ClientConnection)
        connection.on_flow = answer.hold
        try:
            yield
        finally:
            connection.on_flow = None

    async def _pump_events(
        self, first: bytes, chunks: Chunks, head: AnswerHead, lease: Lease
    ) -> web.StreamResponse:
        self._is_sse = True
        if head.status != 200:
            self._replay = None
        self._splitter = EventSplitter(MAX_EVENT_BYTES) if self._replay else EventSplitter()
        self._ended = False
        data = first
        while self._response is None and data:
            events = self._splitter.feed(data)
            data = b""
            if not events:
                data = await chunks.next()
                continue
            failure = failure_in(events)
            if failure is None or failure.at:
                await self._begin(head, lease)
            self._take(events, failure)
        if data:
            self._feed(data)
        try:
            await chunks.pour(self._feed)
        except UpstreamLost:
            if not self._ended:  # else the client has everything
                raise
        rest = self._splitter.flush()
        if self._replay is not None and not self._ended:
            raise UpstreamLost("the stream ended without its last event", "closed", delivered=True)
        response = self._response or await self._begin(head, lease)
        if rest:
            await response.write(rest)
        return await self._end()

    def _feed(self, data: bytes) -> None:
        """Forwards what has arrived of a stream. Runs for every token.

        Raises UpstreamLost, Departed, and ConnectionError if the client is gone.
        """
        events = self._splitter.feed(data)
        if events:
            self._take(events, failure_in(events))

    def _take(self, events: bytes, failure: Failure | None) -> None:
        """Forwards complete events up to a failure. Raises as :meth:`_feed` does."""
        if failure is not None:
            events = events[: failure.at]
        if events:
            self._ended = events.endswith(DONE)
            self._forward(events)
        if failure is not None:
            raise UpstreamLost(failure.reason, "error", delivered=True, answer=failure.event)

    def _forward(self, events: bytes) -> None:
        """Sends complete events."""
        assert self._response is not None
        if self._replay is not None:
            if self._continuation is not None:
                events = self._continuation.feed(events)
            if not events:
                return
            events = self._replay.kept_view(events)
            self._journal.add(events)
            if self._keeper is not None and self._head is not None:
                self._keeper.stream(self._head, events)
            events = self._replay.client_view(events)
        self.moved += len(events)
        if self._keeper is not None and self._keeper.wish.numbered:
            before, self._number = self._number, self._number + events.count(b"\n\n")
            events = numbered(events, before)
        if not events:
            return
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        # Not response.write: it takes longer than everything else here.
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        if self._ended:
            self._request[ANSWERED] = self._response.status

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
