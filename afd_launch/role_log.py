"""Output of the roles: to the terminal with the role's name before each line, or to files."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TextIO

from afd.host.logs import PHASE

TAIL_LINES = 15
ERROR_MARK = "afd: error: "
"""Precedes an error sentence for the user in the output of every role (afd_launch/cli.py)."""
_LONGEST_LINE = 64 * 1024
_COLOURS = {
    "control": 35,
    "ffn": 33,
    "attention": 36,
    "prefill": 34,
    "gateway": 32,
}  # ANSI foregrounds


class RoleLog:
    """Writes out one role's stdout and stderr, and keeps the last lines for error reports.

    A line that cannot be written to its file, such as on a full disk, is dropped. The file says how
    many were, once it can be written again.
    """

    def __init__(
        self,
        name: str,
        *,
        out: TextIO,
        directory: Path | None = None,
        on_loss: Callable[[str], None] = lambda reason: None,
        phases: bool = True,
    ) -> None:
        """
        Args:
            on_loss: called with the reason at the first line that is dropped. phases: False if the
                caller says which phase of its start the role is in; the role's own lines about
                that are then not written to ``out``.
        """
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self.error: str | None = None  # the last error sentence that the role printed
        self.phase = ""  # what the role said last that it is doing, while it starts
        self._out = out
        self._phases = phases
        self._prefix = prefix(name, out)
        self.path = directory / f"{name}.log" if directory else None
        self._file: FileIO | None = None
        self._on_loss = on_loss
        self._lost = 0  # lines since the last one that was written

    def feed(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._partial) > _LONGEST_LINE:
            self.flush()

    def flush(self) -> None:
        """Write out a last line that has no newline."""
        if self._partial:
            self._line(self._partial)
            self._partial = b""

    def tail(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._tail)

    def close(self) -> None:
        self.flush()
        if self._file:
            with contextlib.suppress(OSError):  # a full disk over a network
                self._file.close()
            self._file = None

    def _line(self, line: bytes) -> None:
        # Keep only the last state of a progress bar, which overwrites itself with "\r".
        text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")
        self._tail.append(text)
        if ERROR_MARK in text:
            self.error = text.partition(ERROR_MARK)[2]
        _, marked, said = text.partition(PHASE)
        if marked:
            self.phase = said
        if self.path:
            self._write(self.path, text)
        elif self._phases or not marked or ": " in said:
            write_line(f"{self._prefix} {text}", self._out)

    def _write(self, path: Path, text: str) -> None:
        note = f"{self._lost} lines were lost here\n" if self._lost else ""
        data = f"{note}{text}\n".encode()
        try:
            if self._file is None:
                self._file = path.open("ab", buffering=0)
            if self._file.write(data) < len(data):  # the disk is full after a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._lost = 0
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                self._on_loss(f"cannot write {path}: {error.strerror}")


def prefix(name: str, out: TextIO) -> str:
    """Returns ``[attention-0]``, coloured by role on a terminal unless NO_COLOR is set."""
    text = f"[{name}]"
    if not out.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{_COLOURS.get(name.rsplit('-', 1)[0], 37)}m{text}\033[0m"


def say(message: str, out: TextIO | None = None) -> None:
    """Print a line of the supervisor itself."""
    out = out or sys.stdout
    write_line(f"{prefix('afd', out)} {message}", out)


def write_line(text: str, out: TextIO) -> None:
    """Print and flush. A closed pipe (`afd serve | head`) does not end the deployment."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=out, flush=True)
