"""One attempt of a request at one attention instance: send it, and read the answer."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from afd_gateway.headers import request_headers, upstream_url, with_trace
from afd_gateway.owner import ForeignListener
from afd_gateway.pool import Lease
from afd_gateway.settings import GatewaySettings


@dataclass(frozen=True)
class Refused:
    """The upstream's own answer that it failed, for the case that nobody does better."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


Cause = Literal["refused", "unreachable", "closed", "error", "given_up"]
"""Why an attempt failed: no connection (nobody listens, or no way there), the connection or its
stream ended early, vLLM reported an error, or the instance left or stopped answering probes."""


class UpstreamLost(Exception):
    """The upstream failed.

    cause: for metrics. delivered: it may have seen the request. answer: how it says so itself: an
    error response, or the last event of its stream.
    """

    def __init__(
        self,
        reason: str,
        cause: Cause,
        *,
        delivered: bool,
        answer: Refused | bytes | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause: Cause = cause
        self.delivered = delivered
        self.answer = answer


async def send(
    session: aiohttp.ClientSession,
    settings: GatewaySettings,
    request: web.Request,
    body: bytes,
    lease: Lease,
    trace_headers: Mapping[str, str] | None = None,
) -> aiohttp.ClientResponse:
    """Sends the request and waits for the response head, without a time limit.

    trace_headers: sent in place of the client's W3C trace headers; None: those are sent.

    Raises UpstreamLost.
    """
    headers = request_headers(request.headers, pass_credentials=settings.pass_credentials)
    if trace_headers is not None:
        headers = with_trace(headers, trace_headers)
    attempt = asyncio.ensure_future(
        session.request(
            request.method,
            upstream_url(lease.upstream.api_url, request.rel_url),
            headers=headers,
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
        raise UpstreamLost(lease.lost_reason, "given_up", delivered=True) from None
    except (
        aiohttp.ClientConnectorError,
        aiohttp.ConnectionTimeoutError,
        ForeignListener,
    ) as error:
        cause: Cause = "refused" if _is_refused(error) else "unreachable"
        raise UpstreamLost(_words(error), cause, delivered=False) from None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        raise UpstreamLost(_words(error), "closed", delivered=True) from None


class Chunks:
    """The body of an answer, as it arrives. No generator: this runs for every token."""

    def __init__(self, answer: aiohttp.ClientResponse, lease: Lease) -> None:
        self._content = answer.content
        self._lease = lease

    async def next(self) -> bytes:
        """Returns the next bytes, b"" at the end. Raises UpstreamLost if the body ends early."""
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            if (given_up := self._lease.lost_reason) is not None:
                raise UpstreamLost(given_up, "given_up", delivered=True) from None
            raise UpstreamLost(_words(error), "closed", delivered=True) from None


def _is_refused(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )


def _words(error: BaseException) -> str:
    """Returns the reason for an error message, without internal addresses."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection refused" if _is_refused(error) else "cannot be reached"
    if isinstance(error, ForeignListener):
        return "another user listens at its port"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection within the connect timeout"
    return "the connection was closed before the answer was complete"
