"""Splits server-sent events, finds failures among them, and builds error events. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from afd_gateway.errors import error_body

MAX_EVENT_BYTES = 2**20
DONE = b"data: [DONE]\n\n"
"""The last event of an OpenAI stream."""
# Neither can be part of a JSON string, in which quotes are escaped.
_ERROR = b'data: {"error"'
_ABORTED = b'"finish_reason":"abort"'


def _end_of_last_event(data: bytes) -> int:
    """Returns the offset behind the last blank line; 0 if there is none."""
    ends = (b"\n\n", b"\r\n\r\n")
    return max((data.rfind(end) + len(end) for end in ends if end in data), default=0)


class EventSplitter:
    """Forwards complete events at once and holds an incomplete one back.

    Half an event followed by our error event would look like one event to a client. An event
    longer than ``limit`` bytes is forwarded in parts.
    """

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._tail = b""
        self._limit = limit

    def feed(self, chunk: bytes) -> bytes:
        """Returns the bytes to forward now: everything up to the last end of an event."""
        if not self._tail and chunk.endswith(b"\n\n"):  # nearly always
            return chunk
        data = self._tail + chunk if self._tail else chunk
        end = _end_of_last_event(data)
        if len(data) - end > self._limit:
            end = len(data)
        self._tail = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """Returns the held-back bytes, at the regular end of a stream."""
        tail, self._tail = self._tail, b""
        return tail


@dataclass(frozen=True)
class Failure:
    """An event that says that the server, not the request, is at fault.

    at: offset of the event. event: its bytes, b"" if it says nothing to a client. reason: in words.
    """

    at: int
    event: bytes
    reason: str


def failure_in(events: bytes) -> Failure | None:
    """Returns the first failure among complete events.

    vLLM reports a dead engine by an error event with a code of 500 or more, and ends the requests
    of an engine that it stops with the finish reason "abort".
    """
    if (at := events.find(_ERROR)) >= 0:
        event = events[at:].partition(b"\n\n")[0]
        try:
            code = json.loads(event.removeprefix(b"data: "))["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return None
        if isinstance(code, int) and code >= 500:
            return Failure(at, event + b"\n\n", f"vLLM reported an error {code}")
    elif (found := events.find(_ABORTED)) >= 0:
        return Failure(events.rfind(b"data: ", 0, found), b"", "vLLM ended the request")
    return None


def error_event(status: int, message: str) -> bytes:
    return b"data: " + error_body(status, message) + b"\n\n"
