"""One attempt of a request at one attention instance: send it, and read the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from aiohttp import web
from multidict import CIMultiDict

from afd_gateway.answer import Answer, Broken, Sink, ask
from afd_gateway.headers import request_headers, upstream_target, with_trace
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
    settings: GatewaySettings,
    request: web.Request,
    body: bytes,
    lease: Lease,
    trace_headers: Mapping[str, str] | None = None,
    *,
    own: bool,
) -> Answer:
    """Sends the request and waits for the head of the answer, without a time limit.

    trace_headers: sent in place of the client's W3C trace headers; None: those are sent. own: see
    :func:`afd_gateway.answer.ask`.

    Raises UpstreamLost.
    """
    headers = request_headers(request.headers, pass_credentials=settings.pass_credentials)
    if trace_headers is not None:
        headers = with_trace(headers, trace_headers)
    asking = asyncio.ensure_future(
        ask(
            lease.upstream.api_url,
            request.method,
            upstream_target(request.rel_url),
            headers,
            body if request.body_exists else None,
            connect_timeout_s=settings.connect_timeout_s,
            own=own,
        )
    )
    lease.on_lost(asking.cancel)
    try:
        answer = await asking
    except asyncio.CancelledError:
        asking.cancel()
        asking.add_done_callback(_close)  # it may have got its connection in this moment
        if lease.lost_reason is None:
            raise  # the client is gone
        raise UpstreamLost(lease.lost_reason, "given_up", delivered=False) from None
    except (OSError, ForeignListener, asyncio.TimeoutError) as error:
        cause: Cause = "refused" if isinstance(error, ConnectionRefusedError) else "unreachable"
        raise UpstreamLost(_words(error), cause, delivered=False) from None
    lease.on_lost(answer.close)  # wakes the reader
    try:
        await answer.head()
    except Broken as error:
        answer.close()
        raise _lost(error, lease) from None
    except BaseException:
        answer.close()
        raise
    return answer


def _close(asking: asyncio.Future[Answer]) -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().close()


class Chunks:
    """The body of an answer, as it arrives."""

    def __init__(self, answer: Answer, lease: Lease) -> None:
        self._answer = answer
        self._lease = lease

    async def next(self) -> bytes:
        """Returns the next bytes, b"" at the end. Raises UpstreamLost if the body ends early."""
        try:
            return await self._answer.next()
        except Broken as error:
            raise _lost(error, self._lease) from None

    async def pour(self, sink: Sink) -> None:
        """Gives the rest to ``sink``. Raises UpstreamLost if the body ends early, and what ``sink``
        raises."""
        try:
            await self._answer.pour(sink)
        except Broken as error:
            raise _lost(error, self._lease) from None


def _lost(error: Broken, lease: Lease) -> UpstreamLost:
    if lease.lost_reason is not None:
        return UpstreamLost(lease.lost_reason, "given_up", delivered=True)
    return UpstreamLost(_words(error), "closed", delivered=True)


def _words(error: BaseException) -> str:
    """Returns the reason for an error message, without internal addresses."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ForeignListener):
        return "another user listens at its port"
    if isinstance(error, asyncio.TimeoutError):
        return "no connection within the connect timeout"
    if isinstance(error, OSError):
        return "cannot be reached"
    return "the connection was closed before the answer was complete"
