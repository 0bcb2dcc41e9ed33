"""Reads HTTP/1.1 answers of attention instances, with llhttp (package httptools)."""

from __future__ import annotations

from dataclasses import dataclass

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict, CIMultiDictProxy

MAX_HEAD_BYTES = 64 * 2**10
_LENGTHS = ("Content-Length", "Transfer-Encoding")


class Malformed(ValueError):
    """The answer is not valid HTTP."""


@dataclass(frozen=True)
class AnswerHead:
    status: int
    reason: str
    headers: CIMultiDictProxy[str]

    @property
    def content_type(self) -> str:
        """In lower case, without parameters; "" if there is none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def encoded(self) -> bool:
        """Whether the body is compressed."""
        return self.headers.get("Content-Encoding", "identity") != "identity"


class AnswerReader:
    """Reads one answer as its bytes arrive. Interim answers (status 1xx) are left out.

    head: None until it is complete. ended: the answer is complete.
    """

    def __init__(self, method: str) -> None:
        """method: of the request."""
        self.head: AnswerHead | None = None
        self.ended = False
        self._has_body = method != "HEAD"
        self._received = 0  # bytes of a head that is not complete
        self._header_bytes = 0
        self._reason = b""
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._parts: list[bytes] = []
        # It refers to this reader. Dropped at the end: a cycle would need a garbage collection.
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """Returns the decoded bytes of the body; what follows the answer is dropped.

        Raises:
            Malformed: these bytes are no answer.
        """
        if self.ended or self._parser is None:
            return b""
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self.ended:
                raise Malformed(str(error)) from None
        if self.head is None:
            self._received += len(data)
        if max(self._received, self._header_bytes) > MAX_HEAD_BYTES:
            raise Malformed("the head is too long")
        if self.ended:
            self._parser = None
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self, *, whole: bool = True) -> None:
        """The connection has ended. Only a body without a length is complete then, if it ended in
        order (``whole``)."""
        if (
            whole
            and self.head is not None
            and not any(name in self.head.headers for name in _LENGTHS)
        ):
            self.ended = True
        self._parser = None

    # Callbacks of the parser

    def on_status(self, reason: bytes) -> None:
        self._reason = reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self.head is None:  # else it is a trailer
            self._headers.add(_text(name), _text(value).rstrip(" \t"))

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # it calls
        status = self._parser.get_status_code()
        if status < 200:
            self._reason, self._headers = b"", CIMultiDict()
            return
        self.head = AnswerHead(status, _text(self._reason), CIMultiDictProxy(self._headers))
        self.ended = not self._has_body

    def on_body(self, data: bytes) -> None:
        if not self.ended:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        self.ended = self.head is not None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
