"""`afd bench gateway` and `afd bench routing`: real processes briefly, and what is recorded."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from afd.config.deployment import Deployment
from afd_bench import routing
from afd_bench.gateway.caching import PrefixCache
from afd_bench.gateway.cli import Cell, Load, main, medians, records
from afd_bench.gateway.clients import Seen, percentile

LOAD = Load(8, 50)


def cell(side: str, events: int, cpu_s: float = 0.0, failed: int = 0) -> Cell:
    return Cell(LOAD, side, 2.0, Seen(events, 1, failed, 1.0, 4.0, 20.0, 22.0, cpu_s, 0.1))


def test_streams_pass_the_gateway_whole(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--loads", "8x200", "--processes", "1", "--turns", "1", "--seconds", "0.6", "--named"]
    assert main(wanted) == 0
    rows = [
        line.split(" | ") for line in capsys.readouterr().out.splitlines() if "tokens/s" in line
    ]
    for side in ("direct", "gateway x 1", "gateway x 1, named"):
        row = next(row for row in rows if row[1] == side)
        assert float(row[2].replace(",", "")) > 800 and row[-1].rstrip(" |") == "0"


def test_the_median_turn_of_each_side_counts() -> None:
    cells = [cell("direct", events) for events in (10, 30, 20)] + [cell("gateway x 1", 5)]
    assert [found.seen.events for found in medians(cells)] == [20, 5]
    assert percentile([], 0.5) == 0.0 and percentile([3, 1, 2], 0.5) == 2


def test_records_compare_with_direct_and_with_the_gateway_before() -> None:
    cells = [cell("direct", 1000), cell("before", 800, 0.04), cell("gateway x 1", 900, 0.018, 1)]
    found = {(r.case, r.metric): r for r in records(cells, "m", "c", "2026-01-01")}
    ours = found["8 streams, 50 tokens/s, gateway x 1", "events_per_s"]
    assert (ours.value, ours.peer, ours.peer_value, ours.ratio) == (450, "direct", 500, 0.9)
    cpu = found["8 streams, 50 tokens/s, gateway x 1", "cpu_us_per_event"]
    assert (cpu.value, cpu.peer, cpu.peer_value, cpu.ratio) == (20, "before", 50, 2.5)
    assert found["8 streams, 50 tokens/s, gateway x 1", "failed"].ratio == 0
    both = list(records([*cells, cell("gateway x 1, named", 450)], "m", "c", "2026-01-01"))
    (named,) = [r for r in both if r.peer == "unnamed"]
    assert named.case.endswith("x 1, named") and named.ratio == 0.5
    assert ("8 streams, 50 tokens/s, before", "cpu_us_per_event") not in found


def test_routing_by_prefix_finds_more_in_the_caches(capsys: pytest.CaptureFixture[str]) -> None:
    """Two stand-ins, of which each has room for a little more than half of the beginnings."""
    assert routing.main(["--turns", "1", "--requests", "48", "--prefix", "480"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cached = {
        row[0].strip("| "): float(row[-1].rstrip(" |"))
        for line in lines
        if len(row := line.split(" | ")) == 5 and row[0].strip("| ") in routing.SIDES
    }
    assert cached["prefix"] > cached["fewest"] + 0.15


def test_the_served_deployment_is_valid(tmp_path: Path) -> None:
    args = Namespace(groups=12, prefix=960, fit=0.6, model=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert Deployment.from_plain(routing.served_config(args)).attention.instances == 2


def test_the_stand_in_keeps_the_latest_blocks() -> None:
    cache = PrefixCache(limit=4)
    first, second = list(range(64)), list(range(100, 164))
    assert [cache.compute(first), cache.compute(first + [1] * 40)] == [64, 40]
    assert cache.compute(second) == 64 and cache.compute(first) == 0
    assert cache.compute(list(range(200, 264))) == 64 and cache.compute(second) == 64


def test_routing_records_have_the_medians_of_both_sides() -> None:
    turns = [routing.Turn("fewest", 2.0, 100, 200, 0.4), routing.Turn("prefix", 3.0, 50, 100, 0.8)]
    args = Namespace(groups=12, prefix=960, at_once=8, served=False)
    found = {r.metric: r for r in routing.records(turns, args, "m", "c", "2026-01-01")}
    assert found["requests_per_s"].ratio == 1.5 and found["first_token_p50_ms"].ratio == 2
    assert found["cached"].ratio == 2 and found["cached"].peer == "fewest"
    assert routing.table(turns).count("prefix") == 1
