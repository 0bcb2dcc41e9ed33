"""Second processes that ask for the id of a registered member. Without sockets."""

from __future__ import annotations

from collections.abc import Callable

from afd.control.entries import Entry
from afd.control.messages import Refused, Wait

_MOST = 256


class Contenders:
    """Who asked for a taken id, and since when."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        """timeout_s: after which a silent member counts as dead. clock: monotonic seconds."""
        self._patience_s = 2 * timeout_s
        self._clock = clock
        self._since: dict[tuple[str, bytes], float] = {}  # (id, peer)

    def answer(self, holder: Entry, peer: bytes) -> Wait | Refused:
        """Replies to a second process for a registered id.

        The refusal is final once the first process has sent a heartbeat after the second one came:
        a killed process looks alive until its timeout.
        """
        member = holder.member
        reason = (
            f"{member.id} is already running as pid {member.pid} on host {member.host}; "
            "stop it or use another --index"
        )
        key = (member.id, peer)
        if key not in self._since and len(self._since) >= _MOST:
            return Wait(reason)
        since = self._since.setdefault(key, self._clock())
        if holder.peer is not None and holder.heard > since:
            del self._since[key]
            return Refused(reason)
        return Wait(reason)

    def accepted(self, name: str, peer: bytes) -> None:
        """Forgets a process that became the member."""
        self._since.pop((name, peer), None)

    def tick(self) -> None:
        """Forgets those that stopped asking."""
        now = self._clock()
        self._since = {k: t for k, t in self._since.items() if now - t < self._patience_s}
