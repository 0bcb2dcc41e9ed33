"""Counts that the gateway processes of one port share: requests that run, by name.

Every process adds to a row of its own and reads all rows, so that no lock is needed for a count. A
process clears its row when it starts: the requests of its predecessor ended with it. Two processes
that count at the same moment may both pass a limit; each can be wrong by one request.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
from collections import Counter

log = logging.getLogger("afd.gateway")

_NAMES = 4096
_DIGEST = 16
_NUMBER = 4  # bytes of a count


def make_shared(processes: int) -> int:
    """Returns a descriptor of empty shared counts (a memfd), for processes that inherit it."""
    descriptor = os.memfd_create("afd-gateway-counts")
    os.ftruncate(descriptor, _NAMES * (_DIGEST + _NUMBER * processes))
    return descriptor


class Counts:
    """The counts of this process, and of the others if they share a descriptor.

    Args:
        descriptor: from ``make_shared``; None: this process counts alone.
        process: number of this process among ``processes``.
    """

    def __init__(self, descriptor: int | None = None, process: int = 0, processes: int = 1) -> None:
        self._own: Counter[str] = Counter()
        self._columns: dict[str, int | None] = {}
        self._descriptor = descriptor
        self._process, self._processes = process, processes
        self._map: mmap.mmap | None = None
        if descriptor is not None:
            self._map = mmap.mmap(descriptor, _NAMES * (_DIGEST + _NUMBER * processes))
            self._rows = memoryview(self._map)[_NAMES * _DIGEST :].cast("i")
            self._rows[process * _NAMES : (process + 1) * _NAMES] = memoryview(
                bytes(_NAMES * _NUMBER)
            ).cast("i")

    def add(self, name: str, change: int) -> None:
        self._own[name] += change
        column = self._column(name)
        if column is not None:
            self._rows[self._process * _NAMES + column] = self._own[name]

    def others(self, name: str) -> int:
        """Returns the count of the other processes."""
        column = self._column(name)
        if column is None:
            return 0
        rows = range(column, self._processes * _NAMES, _NAMES)
        return sum(self._rows[place] for place in rows) - self._own[name]

    def total(self, name: str) -> int:
        return self._own[name] + self.others(name)

    def _column(self, name: str) -> int | None:
        """Returns the place of a name in every row; None if nothing is shared."""
        if self._map is None:
            return None
        if name not in self._columns:
            self._columns[name] = self._claim(name)
        return self._columns[name]

    def _claim(self, name: str) -> int | None:
        assert self._map is not None and self._descriptor is not None
        digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST).digest()
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            for column in range(_NAMES):
                place = slice(column * _DIGEST, (column + 1) * _DIGEST)
                if self._map[place] == digest:
                    return column
                if not any(self._map[place]):
                    self._map[place] = digest
                    return column
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        log.warning("more than %d names are counted; limits of %s are per process", _NAMES, name)
        return None
