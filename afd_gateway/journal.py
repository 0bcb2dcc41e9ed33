"""What streamed responses have sent so far, kept until they end."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

_BLOCK_BYTES = 16 * 2**10


class JournalSpace:
    """Memory of all journals together, in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        """Returns whether there is room for ``size`` bytes more; negative sizes always fit."""
        if size > 0 and self.used + size > self._limit:
            return False
        self.used += size
        return True


class Journal:
    """The events of one response.

    They are not parsed, because most journals are never read. Blocks of them are compressed,
    because they repeat each other: to about a tenth.
    """

    def __init__(self, space: JournalSpace) -> None:
        self._space = space
        self._blocks: list[bytes] = []
        self._recent: list[bytes] = []
        self._recent_bytes = 0
        self._size = 0
        self.complete = True  # False: there was no room for an event

    def add(self, events: bytes) -> None:
        """Keeps complete events. Drops everything if there is no room for them."""
        if not self.complete:
            return
        if not self._space.take(len(events)):
            self.close()
            self.complete = False
            return
        self._size += len(events)
        self._recent.append(events)
        self._recent_bytes += len(events)
        if self._recent_bytes > _BLOCK_BYTES:
            block = zlib.compress(b"".join(self._recent), 1)
            self._space.take(len(block) - self._recent_bytes)
            self._size += len(block) - self._recent_bytes
            self._blocks.append(block)
            self._recent, self._recent_bytes = [], 0

    def events(self) -> Iterator[bytes]:
        """Yields each event, without the blank line behind it."""
        for block in (*map(zlib.decompress, self._blocks), b"".join(self._recent)):
            yield from (event for event in block.split(b"\n\n") if event)

    def close(self) -> None:
        """Frees the memory."""
        self._space.take(-self._size)
        self._size = self._recent_bytes = 0
        self._blocks, self._recent = [], []
