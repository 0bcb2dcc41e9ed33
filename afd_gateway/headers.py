"""The headers and targets that the gateway forwards. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

# These belong to one connection (RFC 9110 section 7.6.1, and older names in use).
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
     "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
# The gateway handles Expect itself and sets the length from the body that it read.
_REQUEST_ONLY = frozenset({"expect", "content-length"})
# Credentials of the client. Attention instances get Authorization only if they check it.
AUTHORIZATION = "authorization"
_CREDENTIALS = frozenset({AUTHORIZATION, "api-key", "x-api-key", "cookie"})
_W3C = frozenset({"traceparent", "tracestate"})
INSTANCE_HEADER = "x-afd-instance"


def _end_to_end(
    headers: CIMultiDictProxy[str], also: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    named = {
        name.strip().lower()
        for value in headers.getall("Connection", [])
        for name in value.split(",")
    }
    drop = HOP_BY_HOP | named | also
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in drop)


def request_headers(
    headers: CIMultiDictProxy[str], *, pass_credentials: bool = False
) -> CIMultiDict[str]:
    """Returns the client's headers as they go upstream; repeated ones stay repeated.

    pass_credentials: forward Authorization. Cookies and other API key headers never go upstream.
    """
    secret = _CREDENTIALS - {AUTHORIZATION} if pass_credentials else _CREDENTIALS
    return _end_to_end(headers, _REQUEST_ONLY | secret)


def with_trace(headers: CIMultiDict[str], trace: Mapping[str, str]) -> CIMultiDict[str]:
    """Returns headers with the W3C trace headers of ``trace`` in place of their own."""
    kept = ((key, value) for key, value in headers.items() if key.lower() not in _W3C)
    return CIMultiDict([*kept, *trace.items()])


def response_headers(headers: CIMultiDictProxy[str], instance: str) -> CIMultiDict[str]:
    """The upstream's headers as they go to the client, with the instance's name."""
    kept = _end_to_end(headers)
    kept[INSTANCE_HEADER] = instance
    return kept


def upstream_target(target: URL) -> str:
    """Returns path and query of the request's relative URL, exactly as sent."""
    query = f"?{target.raw_query_string}" if target.raw_query_string else ""
    return f"{target.raw_path}{query}"


def wants_upgrade(headers: Mapping[str, str]) -> bool:
    """Whether the client asks for a protocol upgrade (WebSocket), which is not supported."""
    return "upgrade" in headers.get("Connection", "").lower() and "Upgrade" in headers
