"""Pure decisions: the choice of an upstream, and the health state machine."""

from __future__ import annotations

import random

import pytest

from afd_gateway.routing import Router
from afd_gateway.upstreams import (
    Condition,
    Health,
    Probe,
    Upstream,
    View,
    fleet_problem,
    probed,
    request_failed,
    why_lost,
    why_none,
)

HEALTHY = Health(Condition.HEALTHY)
choose = Router("fewest").choose


def attention(index: int, state: str = "ready", health: Health = HEALTHY, busy: int = 0) -> View:
    upstream = Upstream(f"attention-{index}", f"http://h:{index}", generation=1, state=state)
    return View(upstream, health, busy)


def ffn(index: int, state: str = "ready") -> View:
    return View(Upstream(f"ffn-{index}", state=state))


def probe(health: Health, result: Probe, now: float = 0.0, failures: int | None = None) -> Health:
    sent = health.failures if failures is None else failures
    return probed(health, result, failures=sent, now=now, misses=3)


def test_upstream_facts() -> None:
    upstream = Upstream("attention-12", "http://h:1")
    assert (upstream.role, upstream.index) == ("attention", 12)
    rank = Upstream("ffn-1.10")
    assert (rank.role, rank.place) == ("ffn", (1, 10)) and Upstream("ffn-1").place == (1, 0)
    assert upstream.key != Upstream("attention-12", "http://h:1", generation=1).key
    with pytest.raises(AttributeError):
        upstream.generation = 2  # type: ignore[misc]


def test_choose_takes_the_least_busy_then_the_lowest_index() -> None:
    views = [attention(2, busy=1), attention(10, busy=0), attention(3, busy=0)]
    assert choose(views).upstream.id == "attention-3"
    assert choose(views, {views[2].upstream.key}).upstream.id == "attention-10"
    assert choose(views, {view.upstream.key for view in views}) is None
    assert choose([]) is None


def test_choose_takes_only_ready_and_healthy_attention() -> None:
    sick = request_failed(HEALTHY, "connection refused")
    views = [
        attention(0, state="starting"),
        attention(1, state="draining"),
        attention(2, health=Health()),
        attention(3, health=sick),
        ffn(0),
    ]
    assert choose(views) is None
    assert choose([*views, attention(4, busy=99)]).upstream.id == "attention-4"


@pytest.mark.parametrize("seed", range(20))
def test_choose_equals_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    views = [
        attention(
            i,
            rng.choice(["ready", "ready", "starting", "draining"]),
            rng.choice([HEALTHY, HEALTHY, Health()]),
            rng.randrange(3),
        )
        for i in rng.sample(range(20), 8)
    ]
    exclude = {view.upstream.key for view in rng.sample(views, 2)}
    best = None
    for view in views:
        if not view.eligible or view.upstream.key in exclude:
            continue
        if (
            best is None
            or view.outstanding < best.outstanding
            or (view.outstanding == best.outstanding and view.upstream.index < best.upstream.index)
        ):
            best = view
    assert choose(views, exclude) == best


def test_choosing_and_counting_spreads_evenly() -> None:
    busy = [0, 0, 0]
    for _ in range(30):
        view = choose(attention(i, busy=busy[i]) for i in range(3))
        busy[view.upstream.index] += 1
    assert busy == [10, 10, 10]


def test_new_upstream_is_unproven_until_health_answers() -> None:
    health = Health()
    for result in (Probe.REFUSED, Probe.SILENT, Probe.BAD_STATUS):
        health = probe(health, result)
        assert health.condition is Condition.UNPROVEN
    assert probe(health, Probe.OK).condition is Condition.HEALTHY


def test_failed_request_needs_a_later_good_probe() -> None:
    failed = request_failed(HEALTHY, "connection refused")
    assert failed.condition is Condition.UNHEALTHY
    stale = probe(failed, Probe.OK, failures=0)  # this probe started before the request failed
    assert stale.condition is Condition.UNHEALTHY
    assert probe(failed, Probe.OK).condition is Condition.HEALTHY


@pytest.mark.parametrize("result", [Probe.REFUSED, Probe.BAD_STATUS])
def test_a_bad_answer_counts_at_once(result: Probe) -> None:
    health = probe(HEALTHY, result)
    assert health.condition is Condition.UNHEALTHY
    assert result.value in health.reason


def lost(health: Health, now: float, registered: bool = True) -> str | None:
    return why_lost(health, registered=registered, now=now, abandon_after_s=30.0, misses=3)


def test_silence_counts_after_three_misses_and_ends_with_a_good_response() -> None:
    health = HEALTHY
    for second in range(3):
        assert health.condition is Condition.HEALTHY
        health = probe(health, Probe.SILENT, now=float(second))
    assert health.condition is Condition.UNHEALTHY
    assert lost(health, 29.9) is None
    assert lost(health, 30.0) == "no answer for 30 s"
    healed = probe(health, Probe.OK)
    assert (healed.misses, lost(healed, 99.0)) == (0, None)


@pytest.mark.parametrize("result", [Probe.REFUSED, Probe.BAD_STATUS, Probe.SILENT])
def test_requests_are_lost_after_any_failing_probes_in_a_row(result: Probe) -> None:
    """A server that shuts down with open connections refuses new ones and says no more on them."""
    silent = probe(HEALTHY, Probe.SILENT, now=0.0)
    health = probe(silent, result, now=20.0)  # does not start the time anew
    assert lost(health, 29.9) is None and lost(health, 30.0) == "no answer for 30 s"
    assert lost(probe(health, Probe.OK, now=25.0), 99.0) is None
    stale = probe(request_failed(health, "reset"), Probe.OK, failures=0)
    assert lost(stale, 99.0) is None  # it replied, though that does not make it healthy


def test_an_instance_that_left_and_refuses_three_probes_is_lost_at_once() -> None:
    health = HEALTHY
    for _ in range(3):
        assert lost(health, 1.0, registered=False) is None
        health = probe(health, Probe.REFUSED, now=1.0)
    assert lost(health, 1.0, registered=False) == "it has left the deployment"
    assert lost(health, 1.0) is None  # still a member
    stopped = HEALTHY
    for result in (Probe.REFUSED, Probe.REFUSED, Probe.SILENT, Probe.REFUSED, Probe.SILENT):
        stopped = probe(stopped, result, now=1.0)
        assert lost(stopped, 1.0, registered=False) is None  # a stopped process refuses nothing


def test_why_none_names_each_instance_and_its_state() -> None:
    expected = ("attention-0", "attention-1", "attention-2", "attention-3", "ffn-0")
    views = [
        attention(0, state="starting"),
        attention(1, health=request_failed(HEALTHY, "connection refused")),
        attention(2, health=Health()),
    ]
    assert why_none(views, expected) == (
        "no attention instance is ready: attention-0 is starting; attention-1 is unhealthy"
        " (connection refused); attention-2 is starting (its API server has not replied yet);"
        " attention-3 has not joined"
    )
    many = why_none((), [f"attention-{i}" for i in range(100)])
    assert many.endswith("; and 92 more")


def test_fleet_problem() -> None:
    expected = ("attention-0", "attention-1", "ffn-0", "ffn-1")
    assert fleet_problem([attention(1), ffn(0), ffn(1)], expected) is None
    assert fleet_problem([attention(1), ffn(0)], expected) == (
        "not every FFN instance is ready: ffn-1 has not joined"
    )
    assert "ffn-1 is starting" in str(
        fleet_problem([attention(0), ffn(0), ffn(1, "starting")], expected)
    )
    assert str(fleet_problem([ffn(0), ffn(1)], expected)).startswith("no attention instance")
