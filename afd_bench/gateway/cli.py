"""`afd bench gateway`: streams through the gateway beside the same streams without it, in turns.

The upstream is a stand-in that sends events at a given rate, the load generator reads them, and
both share the cores with the gateway: on few cores, the sides differ by what the gateway leaves to
them. A turn runs every side once; the median turn of each side counts.

Sides: ``direct`` (no gateway), ``gateway x N`` (N processes on one port) for each ``--processes``,
with ``--named`` the same for requests whose answers are kept (X-Request-Id), and with
``--before DIR`` the gateway of another checkout, one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import afd_gateway
from afd.errors import AfdError
from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench.gateway.clients import Job, Seen
from afd_bench.python_path import python_path
from afd_gateway.counts import make_shared
from afd_gateway.kept_answers import make_answers

DIRECT, BEFORE, NAMED = "direct", "before", ", named"
TOKENS = 64
_READY_S = 20.0


@dataclass(frozen=True)
class Load:
    """streams: at a time. rate: tokens/s of each."""

    streams: int
    rate: float

    @property
    def name(self) -> str:
        return f"{self.streams} streams, {self.rate:g} tokens/s"


@dataclass(frozen=True)
class Cell:
    """One side of one turn. seconds: length of the window."""

    load: Load
    side: str
    seconds: float
    seen: Seen

    @property
    def events_per_s(self) -> float:
        return self.seen.events / self.seconds

    @property
    def cpu_us_per_event(self) -> float:
        return 1e6 * self.seen.cpu_s / max(1, self.seen.events)


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    sides = [DIRECT, *([BEFORE] if args.before else []), *map(_side, args.processes)]
    if args.named:
        sides += [side + NAMED for side in map(_side, args.processes)]
    cells: list[Cell] = []
    with _child([sys.executable, "-m", "afd_bench.gateway.upstream"]) as upstream:
        url = f"http://127.0.0.1:{_line(upstream, 'the stand-in upstream')}"
        for load in args.loads:
            for _ in range(args.turns):
                for side in sides:
                    cell = measure(load, side, url, args)
                    cells.append(cell)
                    print(_row(cell), flush=True)
    print(table(cells))
    if args.out is not None:
        write_records(
            args.out, list(records(cells, machine(), command_line("gateway", argv), today()))
        )
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        type=_load,
        default=[Load(256, 20), Load(1024, 20), Load(2048, 20), Load(2048, 5)],
        metavar="STREAMSxRATE",
        help="streams at a time and tokens/s of each (default 256x20 1024x20 2048x20 2048x5)",
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2], help="of the gateway")
    parser.add_argument("--named", action="store_true", help="also requests with an id")
    parser.add_argument("--before", type=Path, help="another checkout, whose gateway is a side too")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="window of each measurement")
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)


def _load(text: str) -> Load:
    streams, _, rate = text.partition("x")
    return Load(int(streams), float(rate))


def _side(processes: int) -> str:
    return f"gateway x {processes}"


def measure(load: Load, side: str, url: str, args: argparse.Namespace) -> Cell:
    """Runs one side of one load. Raises AfdError if a process fails."""
    with contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        pids: list[int] = []
        named = side.endswith(NAMED)
        if side != DIRECT:
            checkout = args.before if side == BEFORE else Path(afd_gateway.__file__).parents[1]
            processes = 1 if side == BEFORE else int(side.removesuffix(NAMED).rpartition(" ")[2])
            port, pids = stack.enter_context(_gateway(checkout, processes, url, named=named))
        job = Job(port, load.streams, TOKENS, load.rate, 1.0, args.seconds, tuple(pids), named)
        clients = stack.enter_context(_child([sys.executable, "-m", "afd_bench.gateway.clients"]))
        out, _ = clients.communicate(json.dumps(asdict(job)))
        if clients.returncode:
            raise AfdError("the load generator failed; see its message above")
    return Cell(load, side, args.seconds, Seen(**json.loads(out)))


@contextlib.contextmanager
def _gateway(
    checkout: Path, processes: int, url: str, *, named: bool
) -> Iterator[tuple[int, list[int]]]:
    """Runs gateway processes that share one listener; yields its port and their pids.

    named: they keep answers.
    """
    program = Path(__file__).with_name("serve.py")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        counts = make_shared(processes)
        stack.callback(os.close, counts)
        inherited: tuple[int, ...] = (listener.fileno(), counts)
        if named:
            inherited += (make_answers(processes),)
            stack.callback(os.close, inherited[-1])
        answers = inherited[-1] if named else -1
        found = []
        for number in range(processes):
            words = map(str, (*inherited[:2], number, processes, answers))
            argv = [sys.executable, str(program), *words, url]
            found.append(stack.enter_context(_child(argv, checkout, inherited)))
        for process in found:
            _line(process, "the gateway")
        yield listener.getsockname()[1], [process.pid for process in found]


@contextlib.contextmanager
def _child(
    argv: Sequence[str], checkout: Path | None = None, descriptors: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Runs a process inside the block. checkout: where Python looks for packages first."""
    process = subprocess.Popen(
        argv,
        env={**os.environ, **({} if checkout is None else python_path(checkout))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdout is not None
    began = time.monotonic()
    line = process.stdout.readline().strip()
    if not line or time.monotonic() - began > _READY_S:
        raise AfdError(f"{what} did not start; see its message above")
    return line


def medians(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the median cell, by events, of each load and side; in the order of the first ones."""
    groups: dict[tuple[Load, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.load, cell.side), []).append(cell)
    return [
        sorted(group, key=lambda cell: (cell.seen.events, -cell.seen.first_byte_p99_ms))[
            len(group) // 2
        ]
        for group in groups.values()
    ]


def _row(cell: Cell) -> str:
    s = cell.seen
    numbers = (
        f"{cell.events_per_s:,.0f} | {s.first_byte_p50_ms:.0f} | {s.first_byte_p99_ms:.0f} |"
        f" {s.gap_p50_ms:.1f} | {s.gap_p99_ms:.1f} | {cell.cpu_us_per_event:.1f} |"
        f" {s.own_cpu_s / cell.seconds:.2f} | {s.failed}"
    )
    return f"| {cell.load.name} | {cell.side} | {numbers} |"


def table(cells: Sequence[Cell]) -> str:
    """Returns Markdown: the median turn of each load and side."""
    lines = [
        "",
        "| load | side | events/s | first byte p50 ms | p99 | gap p50 ms | p99 | CPU us/event"
        " | clients, cores | failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(cell) for cell in medians(cells)),
    ]
    return "\n".join(lines)


def records(cells: Sequence[Cell], host: str, command: str, date: str) -> Iterator[Record]:
    """Yields each gateway side beside direct, and its CPU time per event beside ``before``."""
    failed: dict[tuple[Load, str], int] = {}
    for cell in cells:
        key = (cell.load, cell.side)
        failed[key] = failed.get(key, 0) + cell.seen.failed
    found = {(cell.load, cell.side): cell for cell in medians(cells)}
    for (load, side), cell in found.items():
        direct, before = found[load, DIRECT], found.get((load, BEFORE))
        unnamed = found.get((load, side.removesuffix(NAMED)))
        if side == DIRECT:
            continue
        case = f"{load.name}, {side}"
        ours, theirs = cell.seen, direct.seen
        pairs = [
            ("first_byte_p99_ms", "ms", ours.first_byte_p99_ms, theirs.first_byte_p99_ms),
            ("gap_p99_ms", "ms", ours.gap_p99_ms, theirs.gap_p99_ms),
            ("failed", "requests", failed[load, side], failed[load, DIRECT]),
        ]
        rows = [("events_per_s", "events/s", DIRECT, cell.events_per_s, direct.events_per_s)]
        rows += [(metric, unit, DIRECT, value, peer) for metric, unit, value, peer in pairs]
        if before is not None and side != BEFORE:
            cpu = cell.cpu_us_per_event, before.cpu_us_per_event
            rows.append(("cpu_us_per_event", "us", BEFORE, *cpu))
        if unnamed is not None and side.endswith(NAMED):
            pair = cell.events_per_s, unnamed.events_per_s
            rows.append(("events_per_s", "events/s", "unnamed", *pair))
        for metric, unit, peer, value, peer_value in rows:
            more_is_better = metric == "events_per_s"
            up, down = (value, peer_value) if more_is_better else (peer_value, value)
            ratio = up / down if down else 1.0 if not up else 0.0
            yield Record(
                "gateway", case, metric, round(value, 3), unit, peer, round(peer_value, 3),
                round(ratio, 3), host, command, date=date,
            )  # fmt: skip
