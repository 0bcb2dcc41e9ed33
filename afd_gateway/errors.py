"""Errors of the gateway itself, in OpenAI's format.

The fields and the numeric ``code`` match vLLM's errors (entrypoints/openai/engine/protocol.py,
ErrorInfo), so clients see one format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web

_TYPES: dict[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
}


class GatewayError(Exception):
    """An error response of the gateway itself: HTTP status, one sentence, extra headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Returns {"error": {"message", "type", "param", "code"}} as UTF-8 JSON."""
    kind = _TYPES.get(status) or HTTPStatus(status).phrase.title().replace(" ", "") + "Error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json.dumps({"error": error}).encode()


def error_response(error: GatewayError) -> web.Response:
    return web.Response(
        status=error.status,
        body=error_body(error.status, error.message),
        content_type="application/json",
        headers=error.headers,
    )
