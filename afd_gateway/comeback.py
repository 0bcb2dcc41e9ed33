"""Clients that come back for the rest of an answer: what they name, and what they have. Pure.

A client that gives its request an id (``X-Request-Id``) may send the same request again after its
connection broke. It then gets the answer that was begun (afd_gateway.kept_answers), no other one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from afd_gateway.errors import GatewayError
from afd_gateway.replay import CHAT, MAX_BODY_BYTES, TEXT

REQUEST_ID = "X-Request-Id"
LAST_EVENT_ID = "Last-Event-ID"  # of the standard for server-sent events
_PATHS = frozenset({CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/embeddings"})


@dataclass(frozen=True)
class Wish:
    """What a client wants that may come back.

    name: of its answer (20 bytes), the same for the same request. request_id: as it was sent.
    after: number of the last event that the client has. numbered: its events get numbers, from 1.
    """

    name: bytes
    request_id: str
    after: int = 0
    numbered: bool = False


def wish_of(
    method: str, target: str, headers: Mapping[str, str], body: bytes, client: str
) -> Wish | None:
    """Returns the wish of a request; None: its answer is not kept.

    target: path and query. client: whose request it is; an answer is for the same one only.

    Raises GatewayError 400 if the number of the last event is none.
    """
    request_id = headers.get(REQUEST_ID)
    if not request_id or method != "POST" or target.partition("?")[0] not in _PATHS:
        return None
    if len(body) > MAX_BODY_BYTES:
        return None
    digest = hashlib.blake2b(digest_size=20)
    for part in (client, request_id, target):
        encoded = part.encode(errors="surrogateescape")
        digest.update(b"%d:%b" % (len(encoded), encoded))
    digest.update(body)
    last = headers.get(LAST_EVENT_ID)
    if last and not (last.isascii() and last.isdigit() and len(last) < 12):
        raise GatewayError(400, f"{LAST_EVENT_ID} must be the number of an event, or 0")
    return Wish(digest.digest(), request_id, int(last or 0), last is not None)


def gone(wish: Wish) -> GatewayError:
    """Says that the client has events that are not known here."""
    return GatewayError(
        410,
        f"event {wish.after} of this answer is not kept; send the request without {LAST_EVENT_ID},"
        " or with 0, for an answer from the start",
    )


def rest_of(events: bytes, wish: Wish) -> tuple[bytes, int]:
    """Returns what the client lacks of complete events, and the number of the last of them.

    Raises GatewayError 410 if the client has more than these.
    """
    found = events.split(b"\n\n")[:-1]  # behind the last blank line is nothing
    if wish.after > len(found):
        raise gone(wish)
    rest = b"".join(event + b"\n\n" for event in found[wish.after :])
    return (numbered(rest, wish.after) if wish.numbered else rest), len(found)


def numbered(events: bytes, before: int) -> bytes:
    """Returns complete events with their numbers. before: number of the last event before them."""
    *whole, rest = events.split(b"\n\n")
    return (
        b"".join(
            b"id: %d\n%b\n\n" % (number, event) for number, event in enumerate(whole, before + 1)
        )
        + rest
    )
