"""`afd bench cpu` without servers: stage times, the table, the records, a peer's cores."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from afd_bench.cpu import COMPILED, EAGER, Cell, _records, table
from afd_bench.scrape import stage_times
from afd_bench.servers import server_process
from afd_launch.process import group_members

BEFORE = """
# TYPE afd_stage_seconds histogram
afd_stage_seconds_sum{instance="attention-0",stage="attention"} 1.0
afd_stage_seconds_count{instance="attention-0",stage="attention"} 10
"""
AFTER = """
# TYPE afd_stage_seconds histogram
afd_stage_seconds_sum{instance="attention-0",stage="attention"} 2.0
afd_stage_seconds_count{instance="attention-0",stage="attention"} 20
afd_stage_seconds_sum{instance="attention-1",stage="attention"} 3.0
afd_stage_seconds_count{instance="attention-1",stage="attention"} 10
# TYPE afd_bubble_seconds counter
afd_bubble_seconds_total{instance="attention-0",side="attention"} 0.5
"""


def test_stage_times_add_up_over_instances_and_are_differences():
    times = stage_times(AFTER).since(stage_times(BEFORE))
    assert times.counts["attention"] == 20
    assert times.mean_us("attention") == 1e6 * 4.0 / 20
    assert times.bubble_us("attention") == 1e6 * 0.5 / 20
    assert times.mean_us("ffn") == 0.0 and times.bubble_us("ffn") == 0.0


def test_table_and_records_name_both_peers():
    stages = stage_times(AFTER).since(stage_times(BEFORE))
    cell = Cell(32, 3, 900.0, {EAGER: 1000.0, COMPILED: 1200.0}, stages)
    row = table([cell]).splitlines()[-1]
    assert row.startswith("| 32 | 3 | 900 | 1000 (0.90) | 1200 (0.75) | 200000 |")
    eager, compiled = _records(cell, argparse.Namespace(dtype="bfloat16"), "afd bench cpu")
    assert eager.key != compiled.key
    assert (eager.peer, eager.ratio) == (EAGER, 0.9)
    assert (compiled.peer, compiled.ratio) == (COMPILED, 0.75)


def test_a_server_keeps_to_its_cores(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    show = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    with server_process(show, os.environ, tmp_path / "log", (core,)) as process:
        assert process.wait(60) == 0
    assert (tmp_path / "log").read_text().strip() == str({core})


def test_a_server_does_not_outlive_a_killed_benchmark(tmp_path):
    script = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from afd_bench.servers import server_process\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "with server_process(sleep, os.environ, Path(sys.argv[1])) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        server = int(bench.stdout.readline())
        assert group_members(server) == [server]
        bench.kill()
    end = time.monotonic() + 10
    while group_members(server):
        assert time.monotonic() < end
        time.sleep(0.05)
