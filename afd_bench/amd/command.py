"""`afd bench amd`: the rung of each feature on AMD GPUs (docs/amd.md), and the climb to rung 6.

Without options it writes the table of docs/amd.md and the records docs/results/amd.json, from
afd_bench/amd/features.json and the result files in docs/results/amd-hardware.

--climb FILE runs on a host with AMD GPUs, in a checkout: kernels against references, AITER's tuned
rows, copies between GPUs and their waves, captured graphs, all-reduce formats, a served 1A1F
against colocated vLLM, RDMA to another node. It writes one result file without host names. Put it
into docs/results/amd-hardware and run the command again: what passed becomes rung 6.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from afd.errors import ConfigError
from afd.records import machine, today, write_records
from afd_bench.amd.features import insert, read_features, records, table
from afd_bench.amd.ladder import Outcome, climb, read_result, read_steps

PAGE = Path("docs/amd.md")
RECORDS = Path("docs/results/amd.json")
RESULTS = Path("docs/results/amd-hardware")


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 if a step of the climb failed. Raises ConfigError, AfdError."""
    parser = argparse.ArgumentParser(
        prog="afd bench amd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--climb", type=Path, metavar="FILE", help="run the steps, write FILE")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="of the climb: only these steps")
    parser.add_argument(
        "--peer", default="", metavar="HOST:PORT", help="where afd doctor --listen is"
    )
    parser.add_argument("--ports", default="", metavar="DEVICE:PORT", help="RDMA port, for --peer")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a checkout (default: here)")
    args = parser.parse_args(argv)
    root: Path = args.root
    if args.climb is not None:
        return _climb(args.climb, args.only, {"peer": args.peer, "ports": args.ports})
    if not (root / PAGE).is_file():
        raise ConfigError(f"{root} has no {PAGE}; run afd bench amd in a checkout")
    results = [read_result(path) for path in sorted((root / RESULTS).glob("*.json"))]
    features = read_features()
    page = (root / PAGE).read_text(encoding="utf-8")
    (root / PAGE).write_text(insert(page, table(features, results)), encoding="utf-8")
    (root / RECORDS).unlink(missing_ok=True)  # a feature may have another name now
    write_records(root / RECORDS, records(features, results, machine(), today()))
    print(f"{PAGE} and {RECORDS} written: {len(features)} features, {len(results)} results")
    return 0


def _climb(file: Path, only: Sequence[str] | None, settings: dict[str, str]) -> int:
    steps = read_steps()
    known = [step.name for step in steps]
    if wrong := [name for name in only or () if name not in known]:
        raise ConfigError(f"step {wrong[0]} is unknown; use one of {', '.join(known)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in steps if only is None or step.name in only]
    settings = {**settings, "out": str(file.parent)}
    result = climb(chosen, settings, on_outcome=_show)
    result.save(file)
    print(f"{file} written; send it, or put it into {RESULTS} and run afd bench amd")
    return int(any(outcome.status == "failed" for outcome in result.outcomes))


def _show(outcome: Outcome) -> None:
    last = outcome.text.splitlines()[-1] if outcome.text else ""
    print(f"{outcome.status:8} {outcome.name:12} {outcome.seconds:7.1f} s  {last}", flush=True)
