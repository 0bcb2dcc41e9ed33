"""`afd bench soak`: mixed load for hours, with a kill every minute. Run by ``./run soak``.

Sends ``--requests`` requests of mixed length to a 2A2F deployment, or as many as it answers in
``--minutes``, and kills or restarts a random role every ``--every`` seconds. Counts failed and
wrong requests. Watches resident memory, open files and threads of the roles that are never killed
(supervisor, control plane, gateway): their growth from the second tenth of the requests, or of the
time, to the last one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from afd.errors import AfdError
from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench.faults.command import FAMILY, VOCAB
from afd_bench.faults.faults import FAULTS
from afd_bench.faults.measure import WHOLE_S, config_of
from afd_bench.faults.subject import Subject
from afd_bench.faults.traffic import Counts, Traffic, answered, jobs
from afd_bench.servers import disaggregated
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve

KILLS = (
    "kill -9 FFN", "kill -9 FFN while it starts", "kill -9 attention engine",
    "kill -9 attention API server", "SIGTERM attention",
)  # fmt: skip
WATCHED = ("supervisor", "control-0", "gateway-0")
_PART = 0.1
"""Share of the run. The first one warms up; the medians of the second and the last are compared."""
_LOOK_S = 5.0


@dataclass(frozen=True)
class Size:
    """Of one process: resident bytes, open files, threads."""

    rss: int
    files: int
    threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> Size:
        with process.oneshot():
            return cls(process.memory_info().rss, process.num_fds(), process.num_threads())


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    seed = args.seed if args.seed is not None else int(time.time())
    print(f"--seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="afd-soak-") as folder:
        model = Path(folder)
        make_model(FAMILY, model, resolve(FAMILY, "tiny"))
        with disaggregated(config_of(model), log=args.log) as server:
            subject = Subject(server)
            subject.await_whole(WHOLE_S)
            asked = answered(
                server.url,
                server.model,
                jobs(seed, 48, vocab=VOCAB, new_tokens=(4, args.tokens)),
            )
            with Traffic(
                server.url, server.model, asked, clients=args.clients, seed=seed,
                limit=args.requests,
            ) as traffic:  # fmt: skip
                total, growth = _watch(subject, traffic, args, random.Random(seed))
    print(
        f"{total.done} answered, {total.failed} failed, {total.refused} refused, {total.wrong}"
        f" wrong, longest pause {total.longest_s:.1f} s"
    )
    for why, count in total.reasons.most_common(10):
        print(f"    {count} x {why}")
    for name, value in growth.items():
        print(f"{name}: {100 * value:+.1f} %")
    if args.out is not None:
        command = command_line("soak", argv)
        write_records(args.out, list(records(total, growth, machine(), command, today())))
    return int(total.failed + total.wrong > 0)


def _watch(
    subject: Subject, traffic: Traffic, args: argparse.Namespace, draw: random.Random
) -> tuple[Counts, dict[str, float]]:
    """Injects faults until all requests are answered. Returns the counts, and the growth by name
    ("rss of gateway-0"), as fractions."""
    total = Counts()
    looks: list[tuple[float, dict[str, Size]]] = []
    began = time.monotonic()
    kill_at = began + args.every
    while not traffic.ended:
        time.sleep(_LOOK_S)
        add(total, traffic.read())
        share = (total.done + total.failed) / args.requests
        if args.minutes:
            share = max(share, (time.monotonic() - began) / 60 / args.minutes)
        looks.append((share, _sizes(subject)))
        if share >= 1:
            traffic.finish()
            break
        if time.monotonic() >= kill_at:
            kill_at = time.monotonic() + args.every
            fault = FAULTS[draw.choice(KILLS)]
            before = subject.newest(fault.renews)
            acted = time.monotonic()
            fault.act(subject, draw)
            try:
                subject.await_whole(WHOLE_S, fault.renews, before)
            except AfdError as error:
                print(f"{fault.name}: {error}", flush=True)
            print(
                f"{total.done} answered, {total.failed} failed; {fault.name}: whole after"
                f" {time.monotonic() - acted:.1f} s",
                flush=True,
            )
    add(total, traffic.read())
    return total, dict(grown(looks))


def add(total: Counts, new: Counts) -> None:
    """Adds what is new to the total."""
    for name in ("done", "failed", "refused", "wrong", "tokens"):
        total.__dict__[name] += new.__dict__[name]
    total.longest_s = max(total.longest_s, new.longest_s)
    total.reasons.update(new.reasons)


def grown(looks: Sequence[tuple[float, Mapping[str, Size]]]) -> Iterator[tuple[str, float]]:
    """Yields ("rss of gateway-0", 0.01) for a growth of one percent, for each watched process.

    looks: share of the run and the sizes then, in order of time. Medians are compared, because a
    role that starts at the moment costs the supervisor a few open files.
    """
    early = [sizes for share, sizes in looks if _PART <= share <= 2 * _PART]
    late = [sizes for share, sizes in looks if share >= 1 - _PART]
    for name in WATCHED:
        first, last = ([sizes[name] for sizes in part if name in sizes] for part in (early, late))
        if first and last:
            for what in ("rss", "files", "threads"):
                before, after = (
                    statistics.median(size.__dict__[what] for size in part)
                    for part in (first, last)
                )
                yield f"{what} of {name}", after / before - 1.0


def _sizes(subject: Subject) -> dict[str, Size]:
    found = {"supervisor": psutil.Process(subject.server.pid), **subject.leaders()}
    return {name: Size.of(found[name]) for name in WATCHED if name in found}


def records(
    total: Counts, growth: Mapping[str, float], machine: str, command: str, date: str
) -> Iterator[Record]:
    """Yields failed, wrong and the largest rss_growth, beside what is wanted."""
    case = f"2A2F, {total.done + total.failed} requests, tiny model"
    for metric, value in (("failed", total.failed + total.refused), ("wrong", total.wrong)):
        yield Record(
            "soak", case, metric, float(value), "requests", "wanted", 0.0, float(value == 0),
            machine, command, date=date,
        )  # fmt: skip
    most = max((v for name, v in growth.items() if name.startswith("rss")), default=0.0)
    yield Record(
        "soak", case, "rss_growth", round(most, 4), "fraction", "wanted", 0.02,
        round(1.02 / (1.0 + most), 3), machine, command, date=date,
    )  # fmt: skip


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=100_000, help="(default 100000)")
    parser.add_argument("--minutes", type=float, help="ends then with fewer requests")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=24, help="requests in flight (default 24)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=200,
        help="of the longest answer; the shortest has 4 (default 200)",
    )
    parser.add_argument("--seed", type=int, help="of load and kills (default: new)")
    parser.add_argument("--log", type=Path, help="file for the output of the deployment")
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)
