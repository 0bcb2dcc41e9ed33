"""What the gateway does with the trace of a request, if there is one (afd_gateway.spans)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from aiohttp import web


class Attempt(Protocol):
    """One attempt at an attention instance."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The W3C headers to send in place of the client's."""

    def body(self, body: bytes) -> bytes:
        """Returns the body, which tells the instance under which span to show its steps."""


class Trace(Protocol):
    """The trace of one request."""

    def describe(self, body: bytes) -> None:
        """Adds what the body asks for."""

    def attempt(self, instance: str) -> AbstractContextManager[Attempt]:
        """Encloses an attempt at an attention instance."""


TRACE: web.RequestKey[Trace] = web.RequestKey("trace")
"""Absent without ``metrics.otlp``."""
