"""Finds the exception that ended a process in what the process printed."""

from __future__ import annotations

import re

# vLLM puts the process and its log header before every line of a logged traceback.
_HEADER = re.compile(
    r"^(?:\([^()]*pid=\d+\) ?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\S* [\d:.,]+ \[[^\]]*\] ?)?"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
# How a parent process reports that its child has failed; the child printed the reason before.
_SEE_ABOVE = re.compile(
    r"root cause above|stack trace .*for (?:the )?root cause"
    r"|^(?:SystemExit|KeyboardInterrupt|asyncio\.\S*CancelledError)\b",
    re.I,
)
# pydantic names the fault behind the line of the exception, in one line or below a field's name.
_FAULT_FOLLOWS = re.compile(r"\d+ validation errors? for \S+$")
_FAULT_LINES = 2
_LONGEST = 500


class RootCause:
    """Reads the output of one process line by line and remembers which exception ended it."""

    def __init__(self) -> None:
        self._partial = b""
        self._inside = False  # a traceback: the next line that is not indented is its exception
        self._linked = False  # the next traceback belongs to the exception before it
        self._faults = 0  # lines of the last exception that may name its fault
        self._chain: list[str] = []
        self._found: list[str] = []

    @property
    def text(self) -> str | None:
        """The exception as ``Type: message``, with the one that caused it; None if there is none.

        An exception that only refers to an earlier one ("See root cause above") does not count.
        """
        if not self._found:
            return None
        first, last = self._found[0], self._found[-1]
        return last if first == last else f"{last} (caused by {first})"

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the output."""
        *lines, rest = (self._partial + data).split(b"\n")
        self._partial = rest[-4 * _LONGEST :]
        for line in lines:
            self._line(line.decode("utf-8", "replace").rstrip())

    def _line(self, raw: str) -> None:
        line = _HEADER.sub("", _COLOUR.sub("", raw), count=1)
        if line == _TRACEBACK:
            if not self._linked:
                self._chain = []
            self._inside, self._linked, self._faults = True, False, 0
        elif line in _CHAINED:
            self._linked = True
        elif self._inside and line and not line[0].isspace():
            self._inside = False
            if _EXCEPTION.match(line):
                self._exception(line[:_LONGEST])
        elif self._faults and line:
            fault, behind, _ = line.strip().partition(" [type=")
            self._chain[-1] = f"{self._chain[-1]}: {fault}"[:_LONGEST]
            self._faults = 0 if behind else self._faults - 1

    def _exception(self, text: str) -> None:
        if _SEE_ABOVE.search(text):
            return
        self._chain.append(text)
        self._found = self._chain
        self._faults = _FAULT_LINES if _FAULT_FOLLOWS.search(text) else 0
