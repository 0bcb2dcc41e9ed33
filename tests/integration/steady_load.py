"""Requests of many kinds, asked again and again while instances come and go."""

import threading
import time
from typing import Any

from helpers import wait_until
from replies import Kind, Reply, ask_mixed, kinds, mixed, problems


class Load:
    """Asks the same requests again and again, and compares each answer with an undisturbed one."""

    def __init__(self, url: str, terse: dict[str, float]) -> None:
        self._url = url
        self._requests: list[tuple[Kind, dict[str, Any]]] = mixed(kinds(terse), 24, 50)
        self._wanted: list[Reply] = ask_mixed(url, self._requests)
        errors = {reply.error for reply in self._wanted if reply.error}
        assert not errors, errors
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0
        self.wrong: list[str] = []
        self.longest_s = 0.0

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            found = ask_mixed(self._url, self._requests)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.wrong += [
                words
                for (kind, _), one, other in zip(self._requests, self._wanted, found, strict=True)
                for words in problems(kind, one, other)
            ]
            self.rounds += 1

    def whole_rounds(self, count: int = 2) -> None:
        wanted = self.rounds + count
        wait_until(lambda: self.rounds >= wanted or bool(self.wrong), 240, "more answers")

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(240)
        assert self.rounds and not self.wrong, "\n".join(self.wrong[:5])
