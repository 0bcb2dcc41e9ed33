"""What `afd serve` says while its roles start: what they log themselves (afd.host.logs)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

PROGRESS_S = 5.0
"""After so many seconds without a line, one says what the start waits for."""
LASTING_S = 1.0
"""Shorter phases have no line."""
READY = "ready"
"""Ends the last phase of a role."""
_NAMED = 3
"""So many roles are named; of more, the first one and the number of the others."""


class StartProgress:
    """Says each phase of a kind of role once: when one of them has been in it for ``LASTING_S``.

    Attributes:
        began: when the roles began to start, on the monotonic clock.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.began = time.monotonic()
        self._say = say
        self._spoke = self.began
        self._now_in: dict[str, tuple[str, float]] = {}  # role -> phase, and since when
        self._said: set[tuple[str, str]] = set()

    def follow(self, phases: Mapping[str, str], now: float) -> None:
        """phases: by running role, what it said last; "" if it said nothing."""
        for name, said in phases.items():
            phase = _phase(said)
            if phase in ("", READY):
                continue
            known, since = self._now_in.get(name, ("", now))
            if known != phase:
                self._now_in[name] = phase, now
            elif now - since >= LASTING_S and (_kind(name), phase) not in self._said:
                self._said.add((_kind(name), phase))
                alike = sum(_kind(other) == _kind(name) for other in phases)
                label = name if alike == 1 else f"{name}, one of {alike},"
                self._tell(f"{label} is {said}", now)

    def remind(self, waiting: str, now: float) -> None:
        """waiting: what the start waits for, such as from :func:`waiting_for`."""
        if now - self._spoke > PROGRESS_S:
            self._tell(f"waiting for {waiting}", now)

    def _tell(self, text: str, now: float) -> None:
        self._spoke = now
        self._say(f"{now - self.began:.0f} s, {text}")


def waiting_for(waits: Mapping[str, str], phases: Mapping[str, str]) -> str:
    """Returns ``ffn-0, ffn-1 to join the control plane (importing torch); ...``.

    Roles of one kind that do the same are one entry, with what the first of them said.

    Args:
        waits: by role, what it still has to do. phases: by role, what it said last.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, wait in waits.items():
        groups.setdefault((_kind(name), wait, _phase(phases.get(name, ""))), []).append(name)
    found = []
    for (_, wait, _), names in groups.items():
        said = phases.get(names[0])
        found.append(f"{_few(names)} {wait}{f' ({said})' if said else ''}")
    return "; ".join(found)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED else f"{names[0]} and {len(names) - 1} more"


def _phase(said: str) -> str:
    return said.partition(": ")[0]


def _kind(name: str) -> str:
    return name.rpartition("-")[0]
