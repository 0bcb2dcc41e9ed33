"""Splits server-sent events and builds error events. Pure."""

from __future__ import annotations

from afd_gateway.errors import error_body

MAX_EVENT_BYTES = 2**20
DONE = b"data: [DONE]\n\n"
"""The last event of an OpenAI stream."""


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


def error_event(status: int, message: str) -> bytes:
    return b"data: " + error_body(status, message) + b"\n\n"
