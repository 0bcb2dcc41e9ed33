"""Counts refused messages and connections, and logs them at a limited rate."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_BURST = 10
_PER_S = 0.5

_log = logging.getLogger(__name__)


class Refusals:
    """Thread-safe. A flood of refusals costs a counter, not a log line each.

    count: all refusals so far.
    """

    def __init__(
        self, log: logging.Logger = _log, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = float(_BURST)
        self._filled = clock()
        self._silent = 0
        self.count = 0

    def note(self, text: str, error: BaseException | None = None) -> None:
        """Counts one refusal and logs it, unless there were many of late.

        error: an exception whose traceback belongs to it.
        """
        with self._lock:
            now = self._clock()
            self._tokens = min(_BURST, self._tokens + (now - self._filled) * _PER_S)
            self._filled = now
            self.count += 1
            if self._tokens < 1:
                self._silent += 1
                return
            self._tokens -= 1
            silent, self._silent = self._silent, 0
        if silent:
            self._log.warning("%d refusals were not logged (%d in all)", silent, self.count)
        self._log.warning("%s", text, exc_info=error)
