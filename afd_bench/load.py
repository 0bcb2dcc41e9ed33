"""`afd bench load`: how long experts take to load, and how much host memory that needs.

Writes a checkpoint of random experts (``--gib``), and loads it with our loader and with vLLM's
(``safetensors_weights_iterator``, copied into stacked parameters as its FusedMoE does). Each side
has a process of its own. They take turns, and the checkpoint's pages are dropped from the page
cache before each load.

``host``: the weights stay in host memory, as for CPU serving. ``device``: they go to a device that
is not this host (torch's ``meta``, which keeps nothing), so only the loaders' own memory remains.
``meta`` would not read vLLM's mapped pages, so they are copied to one buffer instead.
``peak_host_bytes`` is the growth of the process's resident memory beyond the weights that it
keeps, mapped file pages included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from afd.errors import AfdError
from afd.records import Record, command_line, machine, results_file, today, write_records

SIDES = ("afd", "vllm")
SINKS = ("host", "device")
GIB = 1 << 30
RESULT = "afd bench load: "
"""Begins a line of a worker that holds the result of a job."""


@dataclass(frozen=True)
class Shape:
    """Of the experts of the checkpoint, bfloat16."""

    layers: int
    experts: int
    hidden: int
    width: int

    @property
    def layer_bytes(self) -> int:
        return 2 * 3 * self.experts * self.hidden * self.width

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes


@dataclass(frozen=True)
class Cell:
    """One load. shard: "all", or "tp8" and "ep8": rank 0 of 8. Bytes: as the module says."""

    side: str
    shard: str
    sink: str
    seconds: float
    kept_bytes: int
    peak_host_bytes: int


def shape_of(gib: float) -> Shape:
    """Returns layers of 32 experts that 8 ranks can divide evenly; at least two layers."""
    experts, hidden, width = 32, 2048, 1024
    layer = 2 * 3 * experts * hidden * width
    return Shape(max(2, round(gib * GIB / layer)), experts, hidden, width)


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    shape = shape_of(args.gib)
    with tempfile.TemporaryDirectory(dir=args.models) as folder, ExitStack() as stack:
        workers = {side: stack.enter_context(Worker()) for side in SIDES}
        workers["afd"].do({"what": "write", "folder": folder, **asdict(shape)})
        cells = list(
            measure(workers, Path(folder), args.shards, args.sinks, args.threads, args.repeat)
        )
    print(table(cells, shape))
    if args.out is not None:
        found = list(records(cells, shape, machine(), command_line("load", argv), today()))
        write_records(args.out, found)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint (default 4)")
    parser.add_argument("--shards", nargs="+", default=["all", "tp8", "ep8"])
    parser.add_argument("--sinks", nargs="+", choices=SINKS, default=list(SINKS))
    parser.add_argument("--threads", type=int, default=4, help="that read, ours (default 4)")
    parser.add_argument(
        "--repeat", type=int, default=3, help="loads of each cell; the median counts"
    )
    parser.add_argument("--models", type=Path, help="folder for the checkpoint (default: /tmp)")
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)


class Worker:
    """A process of :mod:`afd_bench.load_torch`. A context manager: it ends the process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "afd_bench.load_torch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def do(self, job: dict[str, object]) -> dict[str, float]:
        """Returns the result of a job. Raises AfdError if the process fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(RESULT):
                result: dict[str, float] = json.loads(line.removeprefix(RESULT))
                return result
        raise AfdError("a process of afd bench load failed; see its message above")


def measure(
    workers: Mapping[str, Worker],
    folder: Path,
    shards: Sequence[str],
    sinks: Sequence[str],
    threads: int,
    repeat: int,
) -> Iterator[Cell]:
    """Yields the median load of each side, shard and sink; the sides take turns."""
    for shard in shards:
        for sink in sinks:
            runs: dict[str, list[Cell]] = {side: [] for side in SIDES}
            for _ in range(repeat):
                for side in SIDES:
                    forget(folder)
                    job = {"folder": str(folder), "side": side, "shard": shard, "sink": sink}
                    found = workers[side].do({"what": "load", "threads": threads, **job})
                    sizes = int(found["kept_bytes"]), int(found["peak_host_bytes"])
                    runs[side].append(Cell(side, shard, sink, found["seconds"], *sizes))
            for side in SIDES:
                yield sorted(runs[side], key=lambda cell: cell.seconds)[repeat // 2]


def forget(folder: Path) -> None:
    """Drops a checkpoint's pages from the page cache, so that the next load reads the disk."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def table(cells: Sequence[Cell], shape: Shape) -> str:
    """Returns Markdown: seconds, GB/s of the bytes kept, and memory of each side."""
    lines = [
        f"{shape.nbytes / GIB:.1f} GiB, {shape.layers} layers of {shape.layer_bytes / 1e6:.0f} MB",
        "",
        "| shard | sink | side | seconds | MB of weights | peak host MB beyond them |",
        "|---|---|---|---|---|---|",
    ]
    for c in cells:
        numbers = f"{c.seconds:.2f} | {c.kept_bytes / 1e6:.0f} | {c.peak_host_bytes / 1e6:.0f}"
        lines.append(f"| {c.shard} | {c.sink} | {c.side} | {numbers} |")
    return "\n".join(lines)


def records(
    cells: Sequence[Cell], shape: Shape, host: str, command: str, date: str
) -> Iterator[Record]:
    """Yields seconds and peak_host_bytes of our loader beside vLLM's."""
    by_cell = {(c.side, c.shard, c.sink): c for c in cells}
    for c in cells:
        peer = by_cell.get(("vllm", c.shard, c.sink))
        if c.side == "vllm" or peer is None:
            continue
        case = f"{shape.nbytes / GIB:.1f} GiB bfloat16, {c.shard}, to {c.sink}"
        ratio = round(peer.seconds / c.seconds, 3)
        yield Record(
            "load", case, "seconds", round(c.seconds, 3), "s", "vllm", round(peer.seconds, 3),
            ratio, host, command, date=date,
        )  # fmt: skip
        ours, theirs = max(c.peak_host_bytes, 1), max(peer.peak_host_bytes, 1)
        yield Record(
            "load", case, "peak_host_bytes", ours, "bytes", "vllm", theirs,
            round(theirs / ours, 3), host, command, date=date,
        )  # fmt: skip
