"""One client connection: aiohttp's, with errors in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from afd_gateway.errors import GatewayError, error_response


class ClientConnection(web.RequestHandler):
    """aiohttp's protocol of a connection.

    Args:
        on_end: called once, when the connection has ended.
        on_malformed: called for each malformed request.
        on_slow: called when the connection ends because its client does not read.
        slow_s: seconds without a byte read while some wait.
        options: aiohttp's.
    """

    def __init__(
        self,
        server: web.Server,
        *,
        on_end: Callable[[], None],
        on_malformed: Callable[[], None],
        on_slow: Callable[[], None],
        slow_s: float,
        **options: object,
    ) -> None:
        super().__init__(server, **options)  # type: ignore[arg-type]  # aiohttp checks them
        self._on_end = on_end
        self._on_malformed = on_malformed
        self._on_slow = on_slow
        self._slow_s = slow_s
        self._slow_timer: asyncio.TimerHandle | None = None
        self.on_flow: Callable[[bool], None] | None = None
        """Called with True when bytes wait because the client does not read, then with False."""

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._on_end()

    def pause_writing(self) -> None:
        """Called by the transport when bytes wait because the client does not read."""
        super().pause_writing()
        if self.on_flow is not None:
            self.on_flow(True)
        self._watch_client()

    def resume_writing(self) -> None:
        self._stop_timer()
        super().resume_writing()
        if self.on_flow is not None:
            self.on_flow(False)

    def _stop_timer(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def _watch_client(self, before: int | None = None) -> None:
        """Ends the connection if no fewer bytes wait than ``before``; else looks again later."""
        self._slow_timer = None
        transport = self.transport
        if transport is None:
            return
        waiting = transport.get_write_buffer_size()
        if before is not None and waiting >= before:
            self._on_slow()
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._slow_timer = loop.call_later(self._slow_s, self._watch_client, waiting)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the response to a request that aiohttp cannot read or that failed in aiohttp."""
        malformed = isinstance(exc, HttpProcessingError)
        if malformed:
            self._on_malformed()
        if request.writer.output_size > 0:  # too late for a response: aiohttp ends the connection
            return super().handle_error(request, status, exc, message)
        self.log_exception("Error handling a request", exc_info=exc)
        # Not aiohttp's message: it repeats parts of the request.
        if isinstance(exc, LineTooLong):
            status = 431
            words = f"the request line or a header is longer than {self.max_field_size} bytes"
        elif malformed:
            words = "the request is not valid HTTP"
        else:
            words = "internal error of the gateway; see its log"
        response = error_response(GatewayError(status, words))
        response.force_close()
        return response
