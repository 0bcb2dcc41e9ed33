"""Errors made by the gateway itself, in the shape that OpenAI clients know.

The fields and the numeric ``code`` are those of vLLM's own errors (entrypoints/openai/engine/
protocol.py, ErrorInfo), so that a client sees one shape whoever made the error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from aiohttp import web

_TYPES: dict[int, str] = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
}


class GatewayError(Exception):
    """An answer the gateway makes itself: HTTP status, one sentence, further headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """{"error": {"message", "type", "param", "code"}} as UTF-8 JSON."""
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
