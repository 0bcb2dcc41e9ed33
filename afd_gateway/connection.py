"""One client connection: aiohttp's, with errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from afd_gateway.errors import GatewayError, error_response


class ClientConnection(web.RequestHandler):
    """aiohttp's protocol of a connection.

    Args:
        on_end: called once, when the connection has ended.
        on_malformed: called for each malformed request.
        options: aiohttp's.
    """

    def __init__(
        self,
        server: web.Server,
        *,
        on_end: Callable[[], None],
        on_malformed: Callable[[], None],
        **options: object,
    ) -> None:
        super().__init__(server, **options)  # type: ignore[arg-type]  # aiohttp checks them
        self._on_end = on_end
        self._on_malformed = on_malformed

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._on_end()

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
