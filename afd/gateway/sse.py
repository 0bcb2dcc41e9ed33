"""Server-sent events as bytes: whole events only, and an error as one event. Pure."""

from __future__ import annotations

from afd.gateway.errors import error_body

MAX_EVENT_BYTES = 2**20
DONE = b"data: [DONE]\n\n"
"""The last event of an OpenAI stream."""


def _end_of_last_event(data: bytes) -> int:
    """Offset just behind the last blank line, 0 if there is none."""
    marks = (b"\n\n", b"\r\n\r\n")
    return max((data.rfind(mark) + len(mark) for mark in marks if mark in data), default=0)


class EventSplitter:
    """Passes on whole events at once and holds back an unfinished one.

    A client must never see half an event followed by our error event, because it would take the
    two for one. An event nobody finishes within ``limit`` bytes is passed on as it is.
    """

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._tail = b""
        self._limit = limit

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that may go out now: everything up to the last end of an event."""
        data = self._tail + chunk if self._tail else chunk
        end = _end_of_last_event(data)
        if len(data) - end > self._limit:
            end = len(data)
        self._tail = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """What is held back, for the regular end of a stream."""
        tail, self._tail = self._tail, b""
        return tail


def error_event(status: int, message: str) -> bytes:
    return b"data: " + error_body(status, message) + b"\n\n"
