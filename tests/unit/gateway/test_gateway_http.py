"""Pure functions for HTTP: headers, URLs, server-sent events, error bodies."""

from __future__ import annotations

import json
import random

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from afd_gateway.errors import GatewayError, error_body, error_response
from afd_gateway.headers import request_headers, response_headers, upstream_target, wants_upgrade
from afd_gateway.sse import EventSplitter, error_event


def proxy(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def test_request_headers() -> None:
    kept = request_headers(
        proxy(
            ("Host", "h"),
            ("Accept", "a"),
            ("Accept", "b"),
            ("Connection", "close, X-One"),
            ("connection", "x-two"),
            ("X-One", "1"),
            ("X-Two", "2"),
            ("Transfer-Encoding", "chunked"),
            ("Content-Length", "3"),
            ("Expect", "100-continue"),
            ("Upgrade", "h2c"),
        )
    )
    assert list(kept.items()) == [("Host", "h"), ("Accept", "a"), ("Accept", "b")]


def test_response_headers() -> None:
    kept = response_headers(
        proxy(("Content-Length", "3"), ("Keep-Alive", "5"), ("X-Afd-Instance", "x")), "attention-1"
    )
    assert list(kept.items()) == [("Content-Length", "3"), ("x-afd-instance", "attention-1")]


@pytest.mark.parametrize(
    "target", ["/v1/models", "/v1/a%2Fb?x=%20&y=a+b", "/v1/%C3%A9?q=", "/v1/../x", "/v1/a//b"]
)
def test_the_target_is_kept(target: str) -> None:
    assert upstream_target(URL(target, encoded=True)) == target


def test_wants_upgrade() -> None:
    assert wants_upgrade(CIMultiDict({"Connection": "keep-alive, Upgrade", "Upgrade": "websocket"}))
    assert not wants_upgrade(CIMultiDict({"Connection": "keep-alive"}))


def test_error_shape() -> None:
    assert json.loads(error_body(503, "no")) == {
        "error": {
            "message": "no",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    }
    assert json.loads(error_body(418, "tea"))["error"]["type"].endswith("Error")
    response = error_response(GatewayError(503, "no", {"Retry-After": "5"}))
    assert (response.status, response.headers["Retry-After"]) == (503, "5")
    assert response.content_type == "application/json"
    event = error_event(502, "a\nb")
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2  # only the two that end the event, none from the message


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("seed", range(20))
def test_splitter_equals_splitting_the_whole(seed: int, end: bytes) -> None:
    rng = random.Random(seed)
    events = [b"data: " + bytes(rng.choices(b"abc ", k=rng.randrange(9))) + end for _ in range(9)]
    stream = b"".join(events) + rng.choice([b"", b"data: unfinished", b"data: x\n"])
    splitter, out, position = EventSplitter(), b"", 0
    while position < len(stream):
        size = rng.randrange(1, 12)
        position += size
        out += splitter.feed(stream[position - size : position])
        seen = stream[:position]
        whole = seen.rfind(end)
        assert out == (seen[: whole + len(end)] if whole >= 0 else b"")
    assert out + splitter.flush() == stream
    assert splitter.flush() == b""


def test_splitter_passes_whole_events_at_once_and_forwards_an_endless_one() -> None:
    splitter = EventSplitter(limit=10)
    assert splitter.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert splitter.feed(b": ping\n\ndat") == b": ping\n\n"
    assert splitter.feed(b"a: 2\n\n") == b"data: 2\n\n"
    assert splitter.feed(b"x" * 11) == b"x" * 11
