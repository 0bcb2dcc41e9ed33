"""One attempt of a request at one attention instance: send it, and read the answer."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from afd_gateway.headers import request_headers, upstream_url
from afd_gateway.owner import ForeignListener
from afd_gateway.pool import Lease
from afd_gateway.settings import GatewaySettings


@dataclass(frozen=True)
class Refused:
    """The upstream's own answer that it failed, for the case that nobody does better."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


class UpstreamLost(Exception):
    """The upstream failed.

    delivered: it may have seen the request. answer: how it says so itself: an error response, or
    the last event of its stream.
    """

    def __init__(
        self, reason: str, *, delivered: bool, answer: Refused | bytes | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delivered = delivered
        self.answer = answer


async def send(
    session: aiohttp.ClientSession,
    settings: GatewaySettings,
    request: web.Request,
    body: bytes,
    lease: Lease,
) -> aiohttp.ClientResponse:
    """Sends the request and waits for the response head, without a time limit.

    Raises UpstreamLost.
    """
    attempt = asyncio.ensure_future(
        session.request(
            request.method,
            upstream_url(lease.upstream.api_url, request.rel_url),
            headers=request_headers(request.headers, pass_credentials=settings.pass_credentials),
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
            reason = self._lease.lost_reason or _words(error)
            raise UpstreamLost(reason, delivered=True) from None


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
