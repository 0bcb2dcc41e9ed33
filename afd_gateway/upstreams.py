"""The gateway's view of the members, and all decisions about them. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

MemberState = Literal["starting", "ready", "draining"]
Task = Literal["generate", "prefill"]


@dataclass(frozen=True)
class Upstream:
    """One attention or FFN member, or a colocated prefill instance.

    id: "attention-0". api_url: "http://HOST:PORT", "" for FFN. metrics_url: whole URL, "" if none.
    generation: from the control plane, new for every start of the process. task: what an attention
    instance does; "prefill": it computes prompts only.
    """

    id: str
    api_url: str = ""
    metrics_url: str = ""
    generation: int = 0
    state: MemberState = "ready"
    task: Task = "generate"

    @property
    def is_server(self) -> bool:
        """Whether requests of clients go there."""
        return self.role in ("attention", "prefill")

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
        """Identifies the process behind this upstream."""
        return (self.id, self.generation, self.api_url)


Provider = Callable[[], tuple[Upstream, ...]]  # returns the current members; cheap to call


class Probe(enum.Enum):
    """Result of one GET /health."""

    OK = "replied"
    REFUSED = "connection refused"  # the host is alive, the server does not listen
    BAD_STATUS = "not healthy by its own reply"
    SILENT = "no reply"  # timed out, or the host cannot be reached


class Condition(enum.Enum):
    UNPROVEN = "unproven"  # no good /health yet
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True)
class Health:
    """Condition of one process.

    misses, refusals: consecutive silent and refused probes. failing_since: clock seconds of the
    first probe since the last good one.
    failures: failed requests; a probe sent before the last failure does not count.
    """

    condition: Condition = Condition.UNPROVEN
    reason: str = ""
    misses: int = 0
    refusals: int = 0
    failing_since: float | None = None
    failures: int = 0


def probed(health: Health, probe: Probe, *, failures: int, now: float, misses: int) -> Health:
    """Returns the health after a probe.

    failures: ``health.failures`` when the probe was sent. misses: consecutive silent probes that
    make a healthy instance unhealthy (one bad reply is enough).
    """
    if probe is Probe.OK:
        good = replace(health, misses=0, refusals=0, failing_since=None)
        if failures != health.failures:
            return good
        return replace(good, condition=Condition.HEALTHY, reason="")
    failing = replace(
        health,
        misses=health.misses + 1 if probe is Probe.SILENT else 0,
        refusals=health.refusals + 1 if probe is Probe.REFUSED else 0,
        failing_since=now if health.failing_since is None else health.failing_since,
    )
    if health.condition is Condition.UNPROVEN:
        return failing
    if probe is not Probe.SILENT:
        return replace(failing, condition=Condition.UNHEALTHY, reason=f"/health: {probe.value}")
    if health.condition is Condition.HEALTHY and failing.misses >= misses:
        return replace(failing, condition=Condition.UNHEALTHY, reason="/health does not reply")
    return failing


def request_failed(health: Health, reason: str) -> Health:
    """Returns the health after a failed request."""
    return replace(
        health, condition=Condition.UNHEALTHY, reason=reason, failures=health.failures + 1
    )


def why_lost(
    health: Health, *, registered: bool, now: float, abandon_after_s: float, misses: int
) -> str | None:
    """Says why to give up the requests that run there; None to keep waiting.

    They get ``abandon_after_s`` seconds without a good probe. An instance that has also left the
    control plane and refused ``misses`` probes has ended its engine: its requests cannot go on.
    """
    if not registered and health.refusals >= misses:
        return "it has left the deployment"
    if health.failing_since is not None and now - health.failing_since >= abandon_after_s:
        return f"no answer for {abandon_after_s:g} s"
    return None


@dataclass(frozen=True)
class View:
    """One upstream at one moment.

    outstanding: its unfinished requests of this gateway process; elsewhere: of the other processes.
    kv_usage: share of its KV cache in use, 0 to 1; 0 if it is not known.
    """

    upstream: Upstream
    health: Health = Health()
    outstanding: int = 0
    elsewhere: int = 0
    kv_usage: float = 0.0

    @property
    def load(self) -> int:
        """Unfinished requests of all gateway processes."""
        return self.outstanding + self.elsewhere

    @property
    def eligible(self) -> bool:
        return self.in_state("ready")

    def in_state(self, state: MemberState, task: Task = "generate") -> bool:
        """Whether this is a healthy attention instance in ``state`` that does ``task``."""
        return (
            self.upstream.is_server
            and self.upstream.task == task
            and self.upstream.state == state
            and self.health.condition is Condition.HEALTHY
        )


def describe(member_id: str, view: View | None) -> str:
    """Returns a member's state in words: "attention-0 is starting"."""
    if view is None:
        return f"{member_id} has not joined"
    if view.upstream.state != "ready":
        return f"{member_id} is {view.upstream.state}"
    if view.upstream.task == "prefill":
        return f"{member_id} computes prompts only"
    if view.upstream.role != "attention" or view.health.condition is Condition.HEALTHY:
        return f"{member_id} is ready"
    if view.health.condition is Condition.UNPROVEN:
        return f"{member_id} is starting (its API server has not replied yet)"
    return f"{member_id} is unhealthy ({view.health.reason})"


def why_none(views: Iterable[View], expected: Iterable[str], *, shown: int = 8) -> str:
    """Says why no attention instance can take a request. expected: all member ids."""
    by_id = {view.upstream.id: view for view in views}
    ids = dict.fromkeys([*expected, *by_id])  # the expected ones first
    lines = [describe(i, by_id.get(i)) for i in ids if i.startswith("attention-")]
    more = f"; and {len(lines) - shown} more" if len(lines) > shown else ""
    return f"no attention instance is ready: {'; '.join(lines[:shown])}{more}"


def fleet_problem(views: Iterable[View], expected: Iterable[str]) -> str | None:
    """Returns None if an attention instance is healthy and all FFN instances are ready.

    Otherwise says what is missing.
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
