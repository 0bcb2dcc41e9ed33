"""Standard output that never waits for its reader.

A supervisor that waits for somebody to read its output does not restart a dead role meanwhile. So a
thread writes, and lines that find its queue full are dropped and counted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO

QUEUE_BYTES = 1 << 20
LINGER_S = 1.0
"""Seconds that the last lines get at the end, if the reader is slow."""
_RETRY_S = 0.5  # after a write that failed, such as to a full disk


class Output(io.TextIOBase):
    """A text stream over a file descriptor. Its ``write`` does not block.

    dropped: lines that were lost because nobody read, or because they could not be written.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int, *, queue_bytes: int = QUEUE_BYTES) -> None:
        self._descriptor = descriptor
        self._limit = queue_bytes
        self._changed = threading.Condition()  # guards everything below
        self._lines: deque[bytes] = deque()
        self._queued = 0
        self._partial = ""
        self._closing = False
        self._gone = False  # nobody will read any more
        self._untold = 0  # dropped lines of which the reader does not know yet
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="afd-output", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        with self._changed:
            *lines, self._partial = (self._partial + text).split("\n")
            for line in lines:
                data = f"{line}\n".encode(errors="replace")
                if self._gone or self._queued + len(data) > self._limit:
                    self._drop(1)
                    continue
                self._lines.append(data)
                self._queued += len(data)
            self._changed.notify()
        return len(text)

    def finish(self, linger_s: float = LINGER_S) -> None:
        """Writes what is queued, for at most ``linger_s`` seconds. The descriptor stays open."""
        if self._partial:
            self.write("\n")
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(linger_s)  # one that is stuck in a write ends with the process

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._untold += lines

    def _run(self) -> None:
        while not self._gone:
            with self._changed:
                while not (self._lines or self._untold or self._closing):
                    self._changed.wait()
                if not (self._lines or self._untold):
                    return
                # The queued lines are older than those that found it full.
                count, data = len(self._lines), b"".join(self._lines)
                self._lines.clear()
                if self._untold:
                    data += f"[afd] {self._untold} lines were dropped here\n".encode()
                told, self._untold = self._untold, 0
            failed = self._write(data)
            with self._changed:
                self._queued = sum(map(len, self._lines))
                if failed:
                    self._drop(count)
                    self._untold += told
                if failed and self._closing:
                    return

    def _write(self, data: bytes) -> bool:
        """Returns whether it failed: the reader is gone, or a disk is full."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # somebody else made the descriptor non-blocking
                time.sleep(_RETRY_S / 10)
            except OSError as error:
                self._gone = error.errno in (errno.EPIPE, errno.EIO)
                if not self._gone:
                    time.sleep(_RETRY_S)
                return True
        return False


@contextlib.contextmanager
def unblocked_output() -> Iterator[None]:
    """Makes ``sys.stdout`` and ``sys.stderr`` streams that do not block, inside the block."""
    before = sys.stdout, sys.stderr
    outputs = []
    for name in ("stdout", "stderr"):
        stream: TextIO = sys.__dict__[name]
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # a test replaced it
            continue
        stream.flush()
        output = Output(descriptor)
        outputs.append(output)
        setattr(sys, name, output)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for output in outputs:
            output.finish()
