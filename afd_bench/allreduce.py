"""`afd bench allreduce`: every reduce format against NCCL and vLLM's custom all-reduce.

On GPUs, for each number of ranks: messages of 4 KiB to 1 GiB in bfloat16, captured in graphs and
timed by events. `--table FILE` writes the crossover table that the all-reduce backend `quickreduce`
reads. On a CPU (`--device cpu`): the formats of the gloo backend against gloo's own all-reduce, on
small messages. This checks the code and says nothing about the speed of the formats, so records are
written only with `--out`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.devices import DEVICES, device_named
from afd.errors import AfdError
from afd.records import Record, command_line, gpu_names, machine, results_file, today, write_records
from ffn_worker.allreduce.crossover import crossover_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GPU_SIZES = tuple(4 * KIB << i for i in range(0, 19))
CPU_SIZES = (4 * KIB, 64 * KIB, 512 * KIB)
FORMATS = ("fp16", "int8", "int6", "int4", "fp4")
OURS = {"cuda": ("one_shot", "exact", *FORMATS), "cpu": ("exact", *FORMATS)}
PEERS = {"cuda": ("nccl", "vllm"), "cpu": ("gloo",)}
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Cell:
    """The time of one way to sum ``nbytes`` over ``world`` ranks.

    way: one of OURS or PEERS, or the tuning in a sweep. us: the slowest rank's median in us.
    """

    world: int
    way: str
    nbytes: int
    us: float

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s as nccl-tests define it, for the message without a format."""
        return self.nbytes * 2 * (self.world - 1) / self.world / self.us / 1e3


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    gpus = len(gpu_names())
    device = args.device or ("cuda" if gpus > 1 else "cpu")
    on_gpu = device_named(device).has_streams
    worlds = args.worlds or [n for n in (2, 4, 8) if n <= gpus or (not on_gpu and n == 2)]
    if on_gpu and max(worlds, default=gpus + 1) > gpus:
        raise AfdError(
            f"{max(worlds, default=2)} ranks need as many GPUs, this host has {gpus}; use fewer "
            "ranks with --worlds, or --device cpu"
        )
    sizes = [n for n in (GPU_SIZES if on_gpu else CPU_SIZES) if n <= args.most]
    cells = []
    for world in worlds:
        cells += measure(device, world, sizes, args.seconds, sweep=args.sweep)
        print(table(cells, device, world), flush=True)
    command = command_line("allreduce", argv)
    out = args.out or (Path("docs/results/allreduce.json") if on_gpu else None)
    if out is not None and not args.sweep:
        write_records(out, list(records(cells, device, machine(), command, today())))
    if args.table is not None:
        write_table(args.table, cells, machine(), command)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench allreduce", description=__doc__)
    parser.add_argument(
        "--device", choices=tuple(DEVICES), help="default: cuda if the host has two GPUs, else cpu"
    )
    parser.add_argument(
        "--worlds",
        type=_numbers,
        help="numbers of ranks, such as 2,4; default: those of 2, 4 and 8 that fit the GPUs",
    )
    parser.add_argument("--most", type=int, default=GIB, metavar="BYTES", help="largest message")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="approximate seconds per way and size"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="measure tunings of the INT4 kernel instead"
    )
    parser.add_argument("--table", type=Path, help="crossover table to write or extend")
    parser.add_argument(
        "--out",
        type=results_file,
        help="file of the records; default on GPUs: docs/results/allreduce.json",
    )
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def measure(
    device: str, world: int, sizes: Sequence[int], seconds: float, *, sweep: bool = False
) -> list[Cell]:
    """Measures with one process per rank. Raises AfdError if one fails or exceeds the deadline."""
    limit_s = 120 + 20 * len(sizes) * (len(OURS[device]) + len(PEERS[device])) * max(0.1, seconds)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"device": device, "world": world, "sizes": list(sizes), "seconds": seconds}
        settings |= {"ours": OURS[device], "sweep": sweep, "folder": folder}
        command = [sys.executable, "-m", "afd_bench.allreduce_torch", json.dumps(settings)]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(world)]
        try:
            _wait(ranks, limit_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        cells = json.loads((Path(folder) / "cells.json").read_text(encoding="utf-8"))
    return [Cell(world, *cell) for cell in cells]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            break
        if time.monotonic() > end:
            raise AfdError(f"the ranks took over {limit_s:.0f} s; lower --worlds, --most")
        time.sleep(0.05)
    if any(rank.returncode for rank in ranks):
        raise AfdError("a rank of the all-reduce benchmark failed; see its message above")


def table(cells: Sequence[Cell], device: str, world: int) -> str:
    """Returns Markdown: per size the us of every way, and the first peer's time / our best."""
    mine = {(c.way, c.nbytes): c.us for c in cells if c.world == world}
    ways = list(dict.fromkeys(way for way, _ in mine))
    peer = PEERS[device][0]
    head = [f"{world} ranks", *ways, f"{peer} / best"]
    lines = [_row(head), _row(["---"] * len(head))]
    for nbytes in dict.fromkeys(n for _, n in mine):
        row = [mine.get((way, nbytes)) for way in ways]
        ours = [us for way, us in zip(ways, row, strict=True) if us and way not in PEERS[device]]
        words = [f"{us:.1f}" if us else "" for us in row]
        base = mine.get((peer, nbytes))
        ratio = f"{base / min(ours):.2f}" if base and ours else ""
        lines.append(_row([_size(nbytes), *words, ratio]))
    return "\n".join(lines)


def _row(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


def _size(nbytes: int) -> str:
    unit, name = next((u, n) for u, n in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if nbytes >= u)
    return f"{nbytes // unit} {name}"


def records(
    cells: Sequence[Cell], device: str, host: str, command: str, date: str
) -> Iterator[Record]:
    """Yields latency and busbw of each of our ways against each peer that supports the size."""
    by_way = {(c.world, c.way, c.nbytes): c for c in cells}
    for c in cells:
        if c.way in PEERS[device]:
            continue
        for peer in PEERS[device]:
            other = by_way.get((c.world, peer, c.nbytes))
            if other is None:
                continue
            case, ratio = f"{c.world} {c.way} {c.nbytes}", round(other.us / c.us, 3)
            for metric, unit, ours, theirs in (
                ("latency", "us", c.us, other.us),
                ("busbw", "GB/s", c.busbw, other.busbw),
            ):
                numbers = (round(ours, 3), unit, peer, round(theirs, 3), ratio)
                yield Record("allreduce", case, metric, *numbers, host, command, date)


def write_table(path: Path, cells: Sequence[Cell], host: str, command: str) -> None:
    """Replaces the rows of the measured numbers of ranks in a crossover table."""
    worlds = sorted({c.world for c in cells})
    kept = []
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rows = [row for row in kept if row["world"] not in worlds or row["dtype"] != DTYPE]
    for world in worlds:

        def times(way: str, world: int = world) -> dict[int, float]:
            return {c.nbytes: c.us for c in cells if c.world == world and c.way == way}

        for fmt in ("exact", *FORMATS):
            found = crossover_of(times("one_shot"), times("nccl"), times(fmt))
            row = {"world": world, "dtype": DTYPE, "format": fmt}
            row["one_shot_max_bytes"] = found.one_shot_max_bytes
            row["two_shot_min_bytes"] = found.two_shot_min_bytes
            rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f' "machine": {json.dumps(host)},\n "source": {json.dumps(command)},\n'
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{{\n{head} "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
