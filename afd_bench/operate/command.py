"""`afd bench operate`: checks that the dashboards show data and that the alerts tell of a fault.

Runs 2A2F of the demo model under load, kills an FFN instance in the middle, and asks a real
Prometheus for every panel of the dashboard. Panels about GPUs and RDMA ports are fed by a stand-in.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from afd.records import Record, command_line, machine, today, write_records
from afd_bench.operate.prometheus import CACHE, find_programs
from afd_bench.operate.watched import Watched, watch


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a panel is empty or an alert is wrong."""
    parser = argparse.ArgumentParser(prog="afd bench operate", description=__doc__)
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write a page with one picture per panel"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write records as JSON")
    parser.add_argument(
        "--cache",
        type=Path,
        default=CACHE,
        metavar="DIR",
        help="where Debian's package of Prometheus is unpacked if PATH has none",
    )
    args = parser.parse_args(argv)
    program, _ = find_programs(args.cache)
    with tempfile.TemporaryDirectory(prefix="afd-operate-") as folder:
        watched = watch(program, Path(folder))
    found = judged(watched)
    for case, good, text in found:
        print(f"{'ok ' if good else 'BAD'}  {case:40} {text}")
    if args.page is not None:
        from afd_bench.operate.pictures import write_page

        print(f"{write_page(watched, args.page)} pictures on {args.page}")
    if args.out is not None:
        command = command_line("operate", argv)
        write_records(args.out, [_record(case, good, command) for case, good, _ in found])
    return 0 if all(good for _, good, _ in found) else 1


def _record(case: str, good: bool, command: str) -> Record:
    passed = float(good)
    return Record(
        "operate", case, "passed", passed, "1 or 0", "required", 1.0, passed, machine(), command,
        date=today(),
    )  # fmt: skip


def judged(watched: Watched) -> list[tuple[str, bool, str]]:
    """Returns (case, passed, text) per panel and per alert."""
    found = [
        (
            f"panel: {shown.panel.title}",
            not shown.empty,
            "; ".join(shown.empty) or f"{sum(len(lines) for _, lines in shown.series)} series",
        )
        for shown in watched.shown
    ]
    quiet = not watched.false_alerts
    found.append(
        ("alerts: none before the fault", quiet, ", ".join(sorted(watched.false_alerts)) or "none")
    )
    told = not watched.missing_alerts
    found.append(("alerts: FFN instance killed", told, ", ".join(sorted(watched.after)) or "none"))
    whole = not watched.failed_requests
    found.append(("requests: none failed", whole, f"{watched.failed_requests} failed"))
    return found
