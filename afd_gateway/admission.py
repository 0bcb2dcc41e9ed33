"""Which requests may run, which wait for their turn, and which are refused.

Attention instances get as many requests as keep them busy. Further ones wait here, where the order
is fair: the next one is of the API key that runs the fewest requests, of those the one whose last
turn is longest ago; requests of one key keep their order. The queue is bounded in length and time,
so that a client learns of an overload soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web

from afd_gateway.counts import Counts
from afd_gateway.errors import GatewayError
from afd_gateway.settings import GatewaySettings

_LOOK_S = 0.05  # other processes and health checks make room without telling
_WAITING = "waiting"


def takes_a_turn(request: web.Request) -> bool:
    """Whether a request makes an engine work; the others are answered by API servers alone."""
    return (
        request.method == "POST"
        and request.path.startswith("/v1/")
        and not request.path.endswith("/cancel")
    )


@dataclass(eq=False)
class _Waiter:
    """granted: it has its turn, and is counted as running."""

    key: str
    number: int
    granted: bool = False
    turn: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(frozen=True)
class Room:
    """capacity: requests that may run now, on all instances together. wait: whether a request may
    wait if there is none; without it, requests pass and the proxy says why they cannot run."""

    capacity: int
    wait: bool


class Admission:
    """Gives requests their turn. Call it on the event loop.

    Args:
        room: tells the current room. why: says why no instance can take a request; None if one can.
        refused: called with the reason: "queue_full", "queue_time" or "queue_share".
    """

    def __init__(
        self,
        settings: GatewaySettings,
        counts: Counts,
        room: Callable[[], Room],
        why: Callable[[], str | None],
        refused: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._room = room
        self._why = why
        self._refused = refused
        self._queues: dict[str, OrderedDict[int, _Waiter]] = {}
        self._numbers = itertools.count()
        self._served: dict[str, int] = {}  # key -> when it last had a turn
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait in this process."""
        return sum(map(len, self._queues.values()))

    @contextlib.asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Waits for the turn of a request of this API key; the request runs while the block does.

        Raises GatewayError: 503 if the queue is full or the wait too long; 429 if the queue is full
        and this key has most of it.
        """
        if self._queues or not self._has_room():
            await self._wait(key)
        else:
            self._start(key)
        try:
            yield
        finally:
            self._end(key)

    def look(self) -> None:
        """Lets waiting requests run while there is room."""
        while self._queues and self._has_room():
            key = min(
                self._queues,
                key=lambda name: (
                    self._counts.total(f"running {name}"),
                    self._served.get(name, -1),
                    next(iter(self._queues[name])),
                ),
            )
            waiter = next(iter(self._queues[key].values()))
            self._leave(waiter)
            if not waiter.turn.done():
                waiter.granted = True
                self._start(key)
                waiter.turn.set_result(None)
        if self._queues and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_later)

    def _look_later(self) -> None:
        self._timer = None
        self.look()

    def _has_room(self) -> bool:
        room = self._room()
        return not room.wait or self._counts.total("running") < room.capacity

    def _start(self, key: str) -> None:
        self._served[key] = next(self._numbers)
        self._counts.add("running", 1)
        self._counts.add(f"running {key}", 1)

    def _end(self, key: str) -> None:
        self._counts.add("running", -1)
        self._counts.add(f"running {key}", -1)
        self.look()

    async def _wait(self, key: str) -> None:
        """Returns once the request has its turn, and is counted as running."""
        if self._counts.total(_WAITING) >= self._settings.waiting:
            self._make_place(key)
        waiter = _Waiter(key, next(self._numbers))
        self._queues.setdefault(key, OrderedDict())[waiter.number] = waiter
        self._counts.add(_WAITING, 1)
        self.look()
        late = asyncio.get_running_loop().call_later(
            self._settings.waiting_s, self._end_wait, waiter
        )
        try:
            await waiter.turn
        except BaseException:  # the client is gone, it was too long, or it gave way to another
            if waiter.granted:
                self._end(key)
            else:
                self._leave(waiter)
            raise
        finally:
            late.cancel()

    def _end_wait(self, waiter: _Waiter) -> None:
        if waiter.turn.done():
            return
        self._refused("queue_time")
        cause = self._why() or "the attention instances are busy"
        words = f"the request waited {self._settings.waiting_s:g} s for its turn: {cause}"
        waiter.turn.set_exception(self._error(503, words))

    def _make_place(self, key: str) -> None:
        """Refuses the newest request of the key with the longest queue, or this request."""
        queues = self._queues
        longest = max(queues, key=lambda name: len(queues[name]), default=key)
        own = len(queues.get(key, ()))
        if own + 1 < len(queues.get(longest, ())):
            newest = next(reversed(queues[longest].values()))
            self._leave(newest)
            if not newest.turn.done():
                newest.turn.set_exception(self._too_many())
        elif len(queues) > 1:
            raise self._too_many()
        else:
            self._refused("queue_full")
            words = f"{self._settings.waiting} requests wait already; try again later"
            raise self._error(503, words)

    def _too_many(self) -> GatewayError:
        self._refused("queue_share")
        return self._error(
            429, "the queue is full and this API key has its share of it; try again later"
        )

    def _error(self, status: int, words: str) -> GatewayError:
        return GatewayError(status, words, {"Retry-After": str(self._settings.retry_after_s)})

    def _leave(self, waiter: _Waiter) -> None:
        queue = self._queues.get(waiter.key)
        if queue is None or queue.pop(waiter.number, None) is None:
            return
        self._counts.add(_WAITING, -1)
        if not queue:
            del self._queues[waiter.key]
