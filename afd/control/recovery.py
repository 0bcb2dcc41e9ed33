"""What a restarted control plane takes from snapshots of an earlier run, and until when."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from afd.control.messages import Hello, Members
from afd.control.seal import Seal


class RecoveryWindow:
    """The time in which members of an earlier run find their deployment as they left it.

    It ends one timeout after the first registration. Not after the start: members may come back
    late, as on a host that is busy.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._first: float | None = None

    def registered(self) -> None:
        """Notes that a member has registered."""
        if self._first is None:
            self._first = self._clock()

    @property
    def is_open(self) -> bool:
        return self._first is None or self._clock() - self._first <= self._timeout_s


def proven(hello: Hello, seal: Seal, incarnation: int) -> Members:
    """Returns the snapshot of an earlier run of the server that a returning member brings.

    Without one, or if an earlier run did not make it, an empty snapshot.

    Args:
        incarnation: of this run, whose snapshots say nothing new.
    """
    known = hello.known
    if known is None or hello.incarnation == incarnation or not seal.is_on(known):
        return Members()
    return known


def generation_in(snapshot: Members, name: str) -> int:
    """Returns the generation of a member in a snapshot; 0 if it is not in it."""
    return next((x.generation for x in snapshot.members if x.id == name), 0)


def resumed(current: Members, known: Members) -> Members:
    """Returns the current snapshot with the settings and moves of an earlier run's."""
    return msgspec.structs.replace(
        current,
        version=known.version,
        depth=known.depth,
        depths=known.depths,
        draining=known.draining,
        moved=known.moved,
        moving=known.moving,
        switching=known.switching,
        moves=known.moves,
        seats=known.seats,
        moves_left=int(known.moving is not None),  # later ones are lost with the server
    )
