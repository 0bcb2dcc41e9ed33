"""The current upstreams, their health and their running requests. Used on one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import aiohttp

from afd_gateway.admission import Room
from afd_gateway.counts import Counts
from afd_gateway.owner import ForeignListener
from afd_gateway.routing import Router
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import (
    Condition,
    Health,
    MemberState,
    Probe,
    Provider,
    Upstream,
    View,
    probed,
    request_failed,
    why_lost,
    why_none,
)

log = logging.getLogger("afd.gateway")


@dataclass(eq=False)
class _Entry:
    upstream: Upstream
    health: Health = field(default_factory=Health)
    leases: set[Lease] = field(default_factory=set)
    present: bool = True  # False: no longer a member; kept until its requests finish
    probe: asyncio.Task[None] | None = None


class Lease:
    """Counts one request as running on one upstream, until the ``with`` block ends."""

    def __init__(self, entry: _Entry, counts: Counts) -> None:
        self._entry = entry
        self._counts = counts
        self._on_lost: Callable[[], object] | None = None
        self.lost_reason: str | None = None
        entry.leases.add(self)
        counts.add(entry.upstream.id, 1)

    @property
    def upstream(self) -> Upstream:
        return self._entry.upstream

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self._entry.leases.discard(self)
        self._counts.add(self._entry.upstream.id, -1)
        self._on_lost = None

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` (once, on the loop) if the request is given up, to stop its wait."""
        self._on_lost = callback
        if self.lost_reason is not None:
            callback()

    def give_up(self, reason: str) -> None:
        if self.lost_reason is None:
            self.lost_reason = reason
            if self._on_lost is not None:
                self._on_lost()


class Pool:
    """The provider's members with the results of probes and requests.

    kv_usage: see afd_gateway.kv_load, which keeps it current.
    """

    def __init__(
        self, settings: GatewaySettings, provider: Provider, counts: Counts | None = None
    ) -> None:
        self._settings = settings
        self._provider = provider
        self._counts = counts or Counts()
        self._router = Router(settings.routing, settings.max_running, settings.process)
        self._prefill_router = Router(settings.routing, None, settings.process, "prefill")
        self.kv_usage: dict[tuple[str, int, str], float] = {}
        self._entries: dict[tuple[str, int, str], _Entry] = {}
        self._wake = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()
        self._served = False  # an instance has been healthy
        self._new_waiting = 0
        self.closed: str | None = None  # why new requests are refused

    def refresh(self) -> None:
        """Reads the current members. A new process starts unproven, even under a known id."""
        current = {upstream.key: upstream for upstream in self._provider()}
        for key, upstream in current.items():
            entry = self._entries.get(key)
            if entry is None:
                self._entries[key] = _Entry(upstream)
                self._wake.set()  # probe it now, not at the next tick
            else:
                if entry.upstream.state != upstream.state:
                    self._tell_waiters()
                entry.upstream = upstream
                entry.present = True
        for key, entry in list(self._entries.items()):
            entry.present = key in current
            if not entry.present and not entry.leases:
                if entry.probe is not None:
                    entry.probe.cancel()
                del self._entries[key]
                self._router.forget(key)
                self._prefill_router.forget(key)

    def views(self) -> tuple[View, ...]:
        """Returns the present members in a stable order."""
        self.refresh()
        present = (entry for entry in self._entries.values() if entry.present)
        views = [
            View(
                entry.upstream,
                entry.health,
                len(entry.leases),
                self._counts.others(entry.upstream.id),
                self.kv_usage.get(entry.upstream.key, 0.0),
            )
            for entry in present
        ]
        return tuple(sorted(views, key=lambda view: (view.upstream.role, view.upstream.place)))

    @property
    def settled(self) -> bool:
        """Whether there are instances, and a probe has told of every one."""
        instances = [view for view in self.views() if view.upstream.role == "attention"]
        proven = (view.health.condition is not Condition.UNPROVEN for view in instances)
        return bool(instances) and all(proven)

    def acquire(
        self,
        exclude: Collection[tuple[str, int, str]] = (),
        body: bytes = b"",
        state: MemberState = "ready",
    ) -> Lease | None:
        """Returns a lease on the best upstream that is not excluded, or None.

        Args:
            body: of the request; what it begins with decides, see afd_gateway.routing.
            state: only members in this state.
        """
        if self.closed:
            return None
        view = self._router.choose(self.views(), exclude, body, state)
        return None if view is None else Lease(self._entries[view.upstream.key], self._counts)

    def acquire_prefill(
        self, exclude: Collection[tuple[str, int, str]], body: bytes
    ) -> Lease | None:
        """Returns a lease on the best prefill instance that is not excluded, or None."""
        view = self._prefill_router.choose(self.views(), exclude, body)
        return None if view is None else Lease(self._entries[view.upstream.key], self._counts)

    def _acquire_any(self, body: bytes, *, begun: bool) -> Lease | None:
        """Begun answers also go on at an instance that drains."""
        lease = self.acquire((), body)
        return self.acquire((), body, "draining") if lease is None and begun else lease

    def room(self) -> Room:
        """Returns how many requests may run. Others wait while instances are busy or may come back;
        not while the deployment ends or drains."""
        limit = self._settings.max_running
        if limit is None:
            return Room(0, wait=False)
        ready = sum(view.eligible for view in self.views())
        return Room(ready * limit, wait=ready > 0 or self._may_come_back(begun=False))

    def why_none(self) -> str | None:
        """Says why no attention instance can take a request; None if one can."""
        views = self.views()
        if any(view.eligible for view in views):
            return None
        return self.closed or why_none(views, self._settings.expected_ids())

    async def acquire_soon(
        self,
        tried: Collection[tuple[str, int, str]],
        body: bytes = b"",
        *,
        begun: bool,
        lost: bool = False,
    ) -> Lease | None:
        """Returns a lease on the best upstream; waits for one, if one may come back.

        tried: upstreams that have failed the request; taken if there is no other. body: see
        :meth:`acquire`. begun: the client has the beginning of the answer. Others wait only if few
        enough wait already. lost: an upstream had the request and failed. Returns None after the
        time limit, ``replay_s`` for begun and lost requests, or at once if there is no use in
        waiting.
        """
        lease = self.acquire(tried, body) or self._acquire_any(body, begun=begun)
        if lease is not None:
            return lease
        if not begun and self._new_waiting >= self._settings.waiting:
            return None
        loop = asyncio.get_running_loop()
        patient = begun or lost
        end = loop.time() + (self._settings.replay_s if patient else self._settings.waiting_s)
        self._new_waiting += not begun
        try:
            while self._may_come_back(begun=begun) and (left := end - loop.time()) > 0:
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.add(waiter)
                try:
                    await asyncio.wait_for(waiter, left)
                except asyncio.TimeoutError:
                    return None
                finally:
                    self._waiters.discard(waiter)
                if (lease := self._acquire_any(body, begun=begun)) is not None:
                    return lease
        finally:
            self._new_waiting -= not begun
        return None

    @property
    def waiting(self) -> int:
        """Requests that wait for an attention instance."""
        return len(self._waiters)

    def _may_come_back(self, *, begun: bool) -> bool:
        """Whether an instance has served before, and those that are left do not all drain."""
        if self.closed or not self._served:
            return False
        if begun:
            return True
        states = [
            view.upstream.state
            for view in self.views()
            if view.upstream.role == "attention" and view.upstream.task == "generate"
        ]
        return not states or any(state != "draining" for state in states)

    def _tell_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def mark_failed(self, upstream: Upstream, reason: str) -> None:
        """Marks an upstream that failed a request; it gets no requests until /health is good."""
        entry = self._entries.get(upstream.key)
        if entry is not None:
            entry.health = request_failed(entry.health, reason)
            log.warning("upstream %s failed a request: %s", upstream.id, reason)
            self._wake.set()

    def close(self, reason: str) -> None:
        """Refuses new requests and ends the running ones with an error."""
        self.closed = reason
        self._tell_waiters()
        for entry in self._entries.values():
            for lease in tuple(entry.leases):
                lease.give_up(reason)

    async def probe_forever(self, session: aiohttp.ClientSession) -> None:
        """Probes all upstreams each interval, concurrently."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self.refresh()
                self._wake.clear()
                for entry in self._entries.values():
                    if entry.upstream.api_url and (entry.probe is None or entry.probe.done()):
                        entry.probe = loop.create_task(self._probe(session, entry))
                try:
                    await asyncio.wait_for(self._wake.wait(), self._settings.probe_interval_s)
                    await asyncio.sleep(self._settings.probe_interval_s / 20)  # a burst: one round
                except asyncio.TimeoutError:
                    continue
        finally:
            for entry in self._entries.values():
                if entry.probe is not None:
                    entry.probe.cancel()

    async def _probe(self, session: aiohttp.ClientSession, entry: _Entry) -> None:
        failures = entry.health.failures
        result = await probe_once(session, entry.upstream.api_url, self._settings.probe_timeout_s)
        now = asyncio.get_running_loop().time()
        before = entry.health.condition
        entry.health = probed(
            entry.health, result, failures=failures, now=now, misses=self._settings.probe_misses
        )
        if entry.health.condition is not before:
            word = "healthy" if entry.health.condition is Condition.HEALTHY else "unhealthy"
            log.info("upstream %s is %s: %s", entry.upstream.id, word, result.value)
            if entry.health.condition is Condition.HEALTHY:
                self._served = True
                self._tell_waiters()
        lost = why_lost(
            entry.health,
            registered=entry.present,
            now=now,
            abandon_after_s=self._settings.abandon_after_s,
            misses=self._settings.probe_misses,
        )
        if lost is not None:
            for lease in tuple(entry.leases):
                lease.give_up(lost)


async def probe_once(session: aiohttp.ClientSession, api_url: str, timeout_s: float) -> Probe:
    """Sends one GET /health."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(f"{api_url.rstrip('/')}/health", timeout=timeout) as answer:
            return Probe.OK if answer.status == 200 else Probe.BAD_STATUS
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return Probe.REFUSED if refused else Probe.SILENT
    except (aiohttp.ServerDisconnectedError, ForeignListener):
        return Probe.REFUSED
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return Probe.SILENT
