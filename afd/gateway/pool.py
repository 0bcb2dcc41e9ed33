"""The live table of upstreams: their health, and which requests run where. Lives on one loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import aiohttp

from afd.gateway.settings import GatewaySettings
from afd.gateway.upstreams import (
    Condition,
    Health,
    Probe,
    Provider,
    Upstream,
    View,
    choose,
    is_lost,
    probed,
    request_failed,
)

log = logging.getLogger("afd.gateway")


@dataclass(eq=False)
class _Entry:
    upstream: Upstream
    health: Health = field(default_factory=Health)
    leases: set[Lease] = field(default_factory=set)
    present: bool = True  # still a member; one that left is kept while its requests finish
    probe: asyncio.Task[None] | None = None


class Lease:
    """One request's hold on one upstream. Use it in a ``with`` block, which ends the hold."""

    def __init__(self, entry: _Entry) -> None:
        self._entry = entry
        self._on_lost: Callable[[], object] | None = None
        self.lost_reason: str | None = None
        entry.leases.add(self)

    @property
    def upstream(self) -> Upstream:
        return self._entry.upstream

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self._entry.leases.discard(self)
        self._on_lost = None

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` (once, on the loop) if the request is given up: it stops the wait."""
        self._on_lost = callback
        if self.lost_reason is not None:
            callback()

    def give_up(self, reason: str) -> None:
        if self.lost_reason is None:
            self.lost_reason = reason
            if self._on_lost is not None:
                self._on_lost()


class Pool:
    """Members from the provider, joined with what probes and requests found out about them."""

    def __init__(self, settings: GatewaySettings, provider: Provider) -> None:
        self._settings = settings
        self._provider = provider
        self._entries: dict[tuple[str, int, str], _Entry] = {}
        self._wake = asyncio.Event()
        self.closed: str | None = None  # why no request is taken any more

    def refresh(self) -> None:
        """Take over the current members. A new process starts unproven, whatever its id was."""
        current = {upstream.key: upstream for upstream in self._provider()}
        for key, upstream in current.items():
            entry = self._entries.get(key)
            if entry is None:
                self._entries[key] = _Entry(upstream)
                self._wake.set()  # probe it now, not at the next tick
            else:
                entry.upstream = upstream
                entry.present = True
        for key, entry in list(self._entries.items()):
            entry.present = key in current
            if not entry.present and not entry.leases:
                if entry.probe is not None:
                    entry.probe.cancel()
                del self._entries[key]

    def views(self) -> tuple[View, ...]:
        """Members only; in a stable order."""
        self.refresh()
        present = (entry for entry in self._entries.values() if entry.present)
        views = [View(entry.upstream, entry.health, len(entry.leases)) for entry in present]
        return tuple(sorted(views, key=lambda view: (view.upstream.role, view.upstream.place)))

    def acquire(self, exclude: Collection[tuple[str, int, str]] = ()) -> Lease | None:
        """A hold on the best upstream that is not excluded, or None."""
        view = None if self.closed else choose(self.views(), exclude)
        return None if view is None else Lease(self._entries[view.upstream.key])

    def mark_failed(self, upstream: Upstream, reason: str) -> None:
        """A request found the upstream broken; nobody is sent there until it answers /health."""
        entry = self._entries.get(upstream.key)
        if entry is not None:
            entry.health = request_failed(entry.health, reason)
            log.warning("upstream %s failed a request: %s", upstream.id, reason)
            self._wake.set()

    def close(self, reason: str) -> None:
        """Take no more requests and end the running ones, each in the way its client knows."""
        self.closed = reason
        for entry in self._entries.values():
            for lease in tuple(entry.leases):
                lease.give_up(reason)

    async def probe_forever(self, session: aiohttp.ClientSession) -> None:
        """Probe every upstream each interval, each on its own, so that a slow one delays none."""
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
        if is_lost(entry.health, now=now, abandon_after_s=self._settings.abandon_after_s):
            for lease in tuple(entry.leases):
                lease.give_up(f"no answer for {self._settings.abandon_after_s:g} s")


async def probe_once(session: aiohttp.ClientSession, api_url: str, timeout_s: float) -> Probe:
    """One GET /health."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(f"{api_url.rstrip('/')}/health", timeout=timeout) as answer:
            return Probe.OK if answer.status == 200 else Probe.BAD_STATUS
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return Probe.REFUSED if refused else Probe.SILENT
    except aiohttp.ServerDisconnectedError:
        return Probe.REFUSED
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return Probe.SILENT
