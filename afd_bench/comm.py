"""`afd bench comm`: message times between two processes, for every way of sending, in one run.

Two processes, each pinned to its own core, bounce messages over AFD's transports, ZeroMQ and gloo.
The rounds of a case are split into turns, and the ways alternate turn by turn, so that a drift of
the machine's speed affects all of them equally. ``--device cuda`` measures the GPUs of one host
instead.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from afd.devices import DEVICES, device_named
from afd.errors import AfdError
from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench.comm_report import Cells, Times, page

SIZES = (8, 14_336, 917_504, 14_680_064)
"""Bytes: a flag; a row of 7168 in bfloat16; 64 and 1024 such rows."""

# (ours, peer) of every record.
COMPARED = (
    ("shm", "memcpy"),
    ("shm", "ZeroMQ, ipc"),
    ("shm", "gloo"),
    ("shm, from Python", "ZeroMQ, ipc"),
    ("shm, from Python", "gloo"),
    ("shm, traced", "shm"),
    ("tcp", "ZeroMQ, tcp"),
    ("tcp", "gloo"),
    ("tcp, traced", "tcp"),
)


def main(argv: Sequence[str]) -> int:
    # The GPU benchmark has its own options, some with the same names.
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    where.add_argument("--device", default="cpu")
    device, rest = where.parse_known_args(argv)
    if not device_named(device.device).host_memory:
        from afd_bench.comm_gpu import main as gpu_main

        return gpu_main(rest)
    args = _arguments(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise AfdError("afd bench comm needs two cores, one per process; allow it two CPUs")
    from afd_bench.comm_ways import NAMES

    names = [n for n in NAMES if args.only is None or n in args.only]
    cells: Cells = {}
    with _other_side(cores[1], names) as pipe:
        os.sched_setaffinity(0, {cores[0]})
        runner = _Runner(0, names, pipe)
        for size in SIZES:
            taken: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in names}
            for turn in range(args.turns + 1):
                for name in names:
                    rounds = _rounds(name, size, args.seconds / args.turns)
                    pipe.send((name, size, rounds))
                    times = runner.bounce(name, size, rounds)
                    if turn:  # the first turn warms up
                        taken[name].append(times)
            for name in names:
                cell = Times.of(np.concatenate(taken[name]), size, size)
                cells[size, name] = cell
                print(f"{size:9} B  {name:17} p50 {cell.p50:9.2f}  p99 {cell.p99:9.2f} us",
                      flush=True)  # fmt: skip
        pipe.send(None)
        runner.close()
        os.sched_setaffinity(0, cores)
    command = command_line("comm", argv)
    write_records(args.out, records(cells, machine(), command, today()))
    text = page(cells, machine(), command, today())
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench comm", description=__doc__)
    parser.add_argument(
        "--device", choices=tuple(DEVICES), default="cpu", help="cuda: between two GPUs"
    )
    parser.add_argument("--turns", type=int, default=8, help="turns per way and size")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="approximate seconds per way and size"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="WAY", help="measure only these ways, such as shm or gloo"
    )
    parser.add_argument(
        "--out",
        type=results_file,
        default=Path("docs/results/comm.json"),
        help="file of the records; the page gets the same name with .md",
    )
    return parser.parse_args(argv)


# Estimated round trip in us; decides only the number of rounds.
_FIXED_US = {"memcpy": 0.3, "shm": 0.5, "shm, traced": 0.8, "shm, from Python": 8.0}


def _rounds(name: str, size: int, seconds: float) -> int:
    estimate_us = _FIXED_US.get(name, 150.0) + size / (5e3 if name in _FIXED_US else 1e3)
    return max(10, min(20_000, int(seconds * 1e6 / estimate_us)))


class _Runner:
    """One process, with all ways open. pipe: to the other process."""

    def __init__(self, side: int, names: Sequence[str], pipe: Connection) -> None:
        from afd_bench.comm_ways import open_way

        def swap(value: object) -> object:
            pipe.send(value)
            return pipe.recv()

        self._data = {size: np.ones(size, np.uint8) for size in SIZES}
        self._ways = {name: open_way(name, side, max(SIZES), swap) for name in names}

    def bounce(self, name: str, size: int, rounds: int) -> npt.NDArray[np.int64]:
        return self._ways[name].bounce(self._data[size], size, rounds)

    def close(self) -> None:
        for way in self._ways.values():
            way.close()


def _serve(pipe: Connection, core: int, names: Sequence[str]) -> None:
    os.sched_setaffinity(0, {core})
    runner = _Runner(1, names, pipe)
    while (order := pipe.recv()) is not None:
        runner.bounce(*order)
    runner.close()


@contextlib.contextmanager
def _other_side(core: int, names: Sequence[str]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_serve, args=(far, core, names), daemon=True)
    process.start()
    far.close()
    try:
        yield near
        process.join(timeout=20)
    finally:
        process.kill()
        process.join()


def records(cells: Cells, host: str, command: str, date: str) -> list[Record]:
    """Returns the records of our ways against each peer. A ratio above 1 means ours is better."""
    out = []
    for size in SIZES:
        for ours, peer in COMPARED:
            if (size, ours) not in cells or (size, peer) not in cells:
                continue
            for metric, unit in (("p50", "us"), ("p99", "us"), ("max", "us"), ("GBps", "GB/s")):
                value = asdict(cells[size, ours])[metric]
                other = asdict(cells[size, peer])[metric]
                out.append(
                    Record(
                        bench="comm",
                        case=f"{ours} {size}/{size}",
                        metric=metric,
                        value=value,
                        unit=unit,
                        peer=peer,
                        peer_value=other,
                        ratio=value / other if metric == "GBps" else other / value,
                        machine=host,
                        command=command,
                        date=date,
                    )
                )
    return out
