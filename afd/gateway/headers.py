"""Which headers cross the gateway, and the URL a request goes to. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

# Of one connection, not of the message: RFC 9110 section 7.6.1, and the older names in use.
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
     "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
# Expect was answered by the gateway; the length is set again from the body that was read.
_REQUEST_ONLY = frozenset({"expect", "content-length"})
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


def request_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The client's headers as they go upstream; repeated ones stay repeated, Host included."""
    return _end_to_end(headers, _REQUEST_ONLY)


def response_headers(headers: CIMultiDictProxy[str], instance: str) -> CIMultiDict[str]:
    """The upstream's headers as they go to the client, and which instance answered."""
    kept = _end_to_end(headers)
    kept[INSTANCE_HEADER] = instance
    return kept


def upstream_url(api_url: str, target: URL) -> URL:
    """target: the request's relative URL; its path and query are kept exactly as sent."""
    query = f"?{target.raw_query_string}" if target.raw_query_string else ""
    return URL(f"{api_url.rstrip('/')}{target.raw_path}{query}", encoded=True)


def wants_upgrade(headers: Mapping[str, str]) -> bool:
    """Whether the client asks to leave HTTP (WebSocket), which a request proxy cannot forward."""
    return "upgrade" in headers.get("Connection", "").lower() and "Upgrade" in headers
