"""afd.metrics.wire: the transport's traces as exported metrics."""

from __future__ import annotations

import random

import pytest
from fake_trace import FakeHistogram, FakeTrace
from prometheus_client import CollectorRegistry, generate_latest

from afd.metrics.role import SECONDS_BOUNDS, RoleCollector, RoleMetrics, Stage, StageHistogram
from afd.metrics.wire import BOUNDS_NS, wire_families
from afd_comm import Link, Message, PeerTrace, Region, Status, make_flag


def times(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [int(10 ** rng.uniform(2, 10)) for _ in range(count)]


def test_each_peer_and_path_has_its_own_histogram() -> None:
    first = FakeTrace(inbound=FakeHistogram(times(0, 50)), waiting=FakeHistogram([300]))
    traces = {"ffn-0": first, "ffn-1": FakeTrace(offset_error_ns=-1)}
    seconds, error = wire_families(traces)
    got = {
        (s.labels["peer"], s.labels["path"], s.labels.get("le")): s.value for s in seconds.samples
    }
    for bound in BOUNDS_NS:
        below = sum(value <= bound for value in first.inbound.values)
        assert got["ffn-0", "inbound", repr(bound / 1e9)] == below
    assert got["ffn-0", "inbound", "+Inf"] == 50
    assert got["ffn-0", "waiting", "+Inf"] == 1 and got["ffn-1", "inbound", "+Inf"] == 0
    assert {peer for peer, _, _ in got} == {"ffn-0", "ffn-1"}
    assert [(s.labels["peer"], s.value) for s in error.samples] == [("ffn-0", 0.0)]


@pytest.mark.parametrize("role,stage", [("attention", Stage.F2A), ("ffn", Stage.A2F)])
def test_the_wire_stage_is_the_sum_over_all_peers(role: str, stage: Stage) -> None:
    metrics = RoleMetrics(role)  # type: ignore[arg-type]
    plain = StageHistogram()
    for seed in range(3):
        values = times(seed, 200)
        metrics.wire_traces[f"peer-{seed}"] = FakeTrace(inbound=FakeHistogram(values))
        for value in values:
            plain.observe(value / 1e9)
    got = dict(metrics.exported_stages())[stage]
    expected = plain.snapshot()
    assert (got.bounds, got.counts) == (SECONDS_BOUNDS, expected.counts)
    assert got.total == pytest.approx(expected.total)


def test_a_real_trace_is_exported() -> None:
    region, trace = Region(1, 64, name="page"), PeerTrace()
    region.trace((0, 1), trace)
    link = Link(region.addresses, slots=(0, 1), timeout_us=1_000_000, trace=True)
    for seq in range(1, 6):
        flag = make_flag(1, seq)
        assert link.post(Message(0, []), flag) == Status.OK
        assert region.wait_all([0], [flag], 1_000_000) == [Status.OK]
    metrics = RoleMetrics("ffn")
    metrics.wire_traces["attention-0"] = trace
    registry = CollectorRegistry()
    registry.register(RoleCollector(metrics))
    text = generate_latest(registry).decode()
    assert 'afd_wire_seconds_count{path="inbound",peer="attention-0"} 5.0' in text
    assert 'afd_wire_clock_error_seconds{peer="attention-0"} 0.0' in text
    assert 'afd_stage_seconds_count{stage="a2f"} 5.0' in text
