"""Members of the deployment as the gateway sees them, and every decision about them. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

MemberState = Literal["starting", "ready", "draining"]


@dataclass(frozen=True)
class Upstream:
    """One member. An FFN instance has no ``api_url``; its state and metrics still matter here.

    id: "attention-0". api_url: "http://HOST:PORT", "" if none. metrics_url: whole URL, "" if none.
    generation: new for every start of the process, from the control plane.
    """

    id: str
    api_url: str = ""
    metrics_url: str = ""
    generation: int = 0
    state: MemberState = "ready"

    @property
    def role(self) -> str:
        return self.id.rpartition("-")[0]

    @property
    def index(self) -> int:
        return self.place[0]

    @property
    def place(self) -> tuple[int, int]:
        """(instance, rank): "ffn-1.2" is rank 2 of instance 1."""
        index, _, rank = self.id.rpartition("-")[2].partition(".")
        return int(index), int(rank or 0)

    @property
    def key(self) -> tuple[str, int, str]:
        """Two upstreams with different keys are different processes."""
        return (self.id, self.generation, self.api_url)


Provider = Callable[[], tuple[Upstream, ...]]  # the members at this moment; cheap to call


class Probe(enum.Enum):
    """What one GET /health came to."""

    OK = "answered"
    REFUSED = "connection refused"  # its host is alive, the server is not
    BAD_STATUS = "answers that it is not healthy"
    SILENT = "does not answer"  # timed out, or its host cannot be reached


class Condition(enum.Enum):
    UNPROVEN = "unproven"  # has not answered /health yet
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True)
class Health:
    """Condition of one process.

    misses: silent probes in a row; silent_since: clock seconds of the first of them.
    failures: requests that found it broken; a probe sent before the last one proves nothing.
    """

    condition: Condition = Condition.UNPROVEN
    reason: str = ""
    misses: int = 0
    silent_since: float | None = None
    failures: int = 0


def probed(health: Health, probe: Probe, *, failures: int, now: float, misses: int) -> Health:
    """Health after a probe.

    failures: ``health.failures`` when the probe was sent. misses: silent probes in a row that make
    a healthy one unhealthy (one is enough for any other answer).
    """
    if probe is Probe.SILENT:
        since = now if health.silent_since is None else health.silent_since
        late = replace(health, misses=health.misses + 1, silent_since=since)
        if health.condition is Condition.HEALTHY and late.misses >= misses:
            return replace(late, condition=Condition.UNHEALTHY, reason="/health does not answer")
        return late
    heard = replace(health, misses=0, silent_since=None)
    if probe is Probe.OK:
        if failures != health.failures:
            return heard
        return replace(heard, condition=Condition.HEALTHY, reason="")
    if health.condition is Condition.UNPROVEN:
        return heard
    return replace(heard, condition=Condition.UNHEALTHY, reason=f"/health: {probe.value}")


def request_failed(health: Health, reason: str) -> Health:
    """Health after a request found the process broken."""
    return replace(
        health, condition=Condition.UNHEALTHY, reason=reason, failures=health.failures + 1
    )


def is_lost(health: Health, *, now: float, abandon_after_s: float) -> bool:
    """Whether requests that run there should be given up: nothing was heard for that long."""
    return health.silent_since is not None and now - health.silent_since >= abandon_after_s


@dataclass(frozen=True)
class View:
    """One upstream at one moment. outstanding: requests forwarded to it and not yet finished."""

    upstream: Upstream
    health: Health = Health()
    outstanding: int = 0

    @property
    def eligible(self) -> bool:
        return (
            self.upstream.role == "attention"
            and self.upstream.state == "ready"
            and self.health.condition is Condition.HEALTHY
        )


def choose(views: Iterable[View], exclude: Collection[tuple[str, int, str]] = ()) -> View | None:
    """The eligible view with the fewest outstanding requests, ties to the lowest index.

    exclude: keys of upstreams not to choose, e.g. those this request has already tried.
    """
    able = (view for view in views if view.eligible and view.upstream.key not in exclude)
    return min(able, key=lambda view: (view.outstanding, view.upstream.index), default=None)


def describe(member_id: str, view: View | None) -> str:
    """How a member is, in words: "attention-0 is starting"."""
    if view is None:
        return f"{member_id} has not joined"
    if view.upstream.state != "ready":
        return f"{member_id} is {view.upstream.state}"
    if view.upstream.role != "attention" or view.health.condition is Condition.HEALTHY:
        return f"{member_id} is ready"
    if view.health.condition is Condition.UNPROVEN:
        return f"{member_id} is starting (its API server has not answered yet)"
    return f"{member_id} is unhealthy ({view.health.reason})"


def why_none(views: Iterable[View], expected: Iterable[str], *, shown: int = 8) -> str:
    """Why no attention instance takes a request. expected: all member ids of the deployment."""
    by_id = {view.upstream.id: view for view in views}
    ids = dict.fromkeys([*expected, *by_id])  # in order, and members beyond the expected ones too
    lines = [describe(i, by_id.get(i)) for i in ids if i.startswith("attention-")]
    more = f"; and {len(lines) - shown} more" if len(lines) > shown else ""
    return f"no attention instance is ready: {'; '.join(lines[:shown])}{more}"


def fleet_problem(views: Iterable[View], expected: Iterable[str]) -> str | None:
    """None if the deployment can serve: an attention instance is healthy, all FFN ones are ready.

    Otherwise what is missing, in words.
    """
    views, expected = tuple(views), tuple(expected)
    by_id = {view.upstream.id: view for view in views}
    if not any(view.eligible for view in views):
        return why_none(views, expected)
    missing = [
        describe(i, by_id.get(i))
        for i in expected
        if i.startswith("ffn-") and (i not in by_id or by_id[i].upstream.state != "ready")
    ]
    return f"not every FFN instance is ready: {'; '.join(missing)}" if missing else None
