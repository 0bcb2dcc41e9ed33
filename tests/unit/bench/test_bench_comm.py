"""`afd bench comm`: the arithmetic, the page, and a very short run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from afd_bench.comm import COMPARED, SIZES, main, records
from afd_bench.comm_report import Times, page, table
from afd_bench.comm_ways import NAMES


def cell(p50: float) -> Times:
    return Times(p50=p50, p99=2 * p50, max=3 * p50, GBps=1 / p50)


def test_times_are_half_round_trips() -> None:
    trips = np.arange(2_000, 202_000, 2_000)  # ns
    times = Times.of(trips, up=1000, down=3000)
    assert times.p50 == pytest.approx(50.5) and times.max == 100.0
    assert 99.0 <= times.p99 <= 100.0
    assert times.GBps == pytest.approx(4000 / 101_000)


def test_a_ratio_above_one_means_ours_is_better() -> None:
    cells = {(SIZES[0], "shm"): cell(2.0), (SIZES[0], "memcpy"): cell(1.0)}
    made = records(cells, "host", "afd bench comm", "2026-01-01")
    assert {(r.case, r.metric, r.ratio) for r in made} == {
        ("shm 8/8", metric, 0.5) for metric in ("p50", "p99", "max", "GBps")
    }
    assert "| 8 | shm | 2.00 | 4.00 | 6 | 0.50 |" in table(cells)


def test_the_page_says_what_the_cells_say() -> None:
    cells = {
        (SIZES[1], "shm"): cell(0.4),
        (SIZES[1], "memcpy"): cell(0.5),
        (SIZES[1], "shm, traced"): cell(0.44),
        (SIZES[1], "tcp"): cell(50.0),
        (SIZES[1], "ZeroMQ, tcp"): cell(40.0),
    }
    text = page(cells, "host", "afd bench comm", "2026-01-01")
    assert table(cells) in text and "`afd bench comm`, host, 2026-01-01." in text
    assert "- p50 of shm over that of memcpy: 0.80 at 14336 B (aims:" in text
    assert "message over shm: +0.04 us (+10.0 %) at 14336 B (aim: 1 %)" in text
    assert "- p99 of tcp over that of ZeroMQ, tcp: 1.25 at 14336 B (below 1 is a win)." in text
    assert "gloo:" not in text


def test_every_comparison_names_ways_that_exist() -> None:
    assert {name for pair in COMPARED for name in pair} <= set(NAMES)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_short_run_writes_records(tmp_path: Path) -> None:
    out = tmp_path / "comm.json"
    ways = ["memcpy", "shm", "shm, traced", "tcp"]
    assert main(["--turns", "1", "--seconds", "0.01", "--only", *ways, "--out", str(out)]) == 0
    cases = {record["case"] for record in json.loads(out.read_text())}
    assert "shm 14680064/14680064" in cases
    assert "shm, traced 8/8" in cases
    assert "| 14680064 | tcp |" in out.with_suffix(".md").read_text()
