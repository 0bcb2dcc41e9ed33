"""`afd bench wire_gpu`: what a step pays for a wire that the CPU drives, beside backend ipc.

One process holds both sides, each with its own region, link, streams and captured graph, because
two processes take turns on one GPU. With two devices each side has a GPU of its own: on one GPU,
the streams delay each other's waits. Each side has a NIC and a sending thread of its own, as on two
hosts. A step is a walk over positions: attention sends a micro-batch, the FFN answers it. verbs
runs on a libibverbs without hardware (comm/tests/fake_ibverbs.cc), which copies between registered
memory at the rate of ``--gbps``. staged is the same NIC where it cannot register GPU memory:
messages are copied through host memory. tcp is staged too, over loopback, where both sides share
one sending thread.

- round_trip_us: depth 1, no work. One message up and one down.
- with ``--parts``, where a round trip's time goes: see Parts in wire_gpu_torch.py. Printed only,
  and of replays of their own, because messages carry times then.
- step_us: ``--work-us`` of work per position and side, at each of ``--depths``. Time per position
  and micro-batch.

On ``--device cpu`` the sides are threads and every operation is enqueued anew: a test of the code,
not a measurement of the wire.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench import stand_in_nic

if TYPE_CHECKING:
    from afd_bench.wire_gpu_torch import Settings

UP, DOWN = 917_504, 1_835_008
"""Bytes of 128 rows of 7168: FP8 to the FFN, BF16 back, as in the Step-3 report."""
PEER = "ipc"
BACKENDS = ("ipc", "verbs", "staged", "tcp")
ON_THE_NIC = ("verbs", "staged")


@dataclass(frozen=True)
class Cell:
    """Times per position and micro-batch in us. gbps: of the emulated NIC, 0: none."""

    backend: str
    depth: int
    gbps: int
    metric: str
    p50: float
    p99: float
    rounds: int
    bytes_copied: bool = True
    """False: by a NIC that keeps its time and copies nothing."""
    gpus: int = 1
    connections: int = 0
    """Of backend tcp; 0: as many as the library takes."""

    @property
    def case(self) -> str:
        how = "" if self.bytes_copied else " no bytes"
        where = "" if self.gpus == 1 else f" on {self.gpus} GPUs"
        over = f" over {self.connections} connections" if self.connections else ""
        return f"{self.backend} {self.depth} {self.gbps}{how}{where}{over}"


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        library = args.library or stand_in_nic.build(Path(folder))
        # Read by the library when it sends first.
        os.environ["AFD_FAKE_NIC_GBPS"] = str(args.gbps)
        os.environ["AFD_FAKE_NIC_BYTES"] = "0" if args.no_bytes else "1"
        from afd_bench.wire_gpu_torch import Settings, measure

        cells = []
        ways = [
            (backend, connections)
            for backend in args.backends
            for connections in (args.connections if backend == "tcp" else [0])
        ]
        for backend, connections in ways:
            for depth in (0, *args.depths):  # 0: the round trip
                settings = Settings(
                    backend=backend,
                    devices=(args.device[0], args.device[-1]),
                    depth=max(depth, 1),
                    up=args.up,
                    down=args.down,
                    work_us=args.work_us if depth else 0.0,
                    positions=args.positions,
                    replays=args.replays,
                    library=str(library),
                    connections=connections,
                )
                times = sorted(measure(settings))
                cells.append(
                    Cell(
                        backend,
                        settings.depth,
                        args.gbps if backend in ON_THE_NIC else 0,
                        "step_us" if depth else "round_trip_us",
                        times[len(times) // 2],
                        times[int(0.99 * (len(times) - 1))],
                        len(times),
                        bytes_copied=not (args.no_bytes and backend in ON_THE_NIC),
                        gpus=len(set(args.device)),
                        connections=connections,
                    )
                )
                print(cells[-1], flush=True)
                if args.parts and not depth and backend != PEER:
                    print(f"  {_parts(settings)}", flush=True)
    found = records(cells, machine(), command_line("wire_gpu", argv), today())
    if args.out is not None:
        write_records(args.out, found)
    for record in found:
        print(f"{record.case:32} {record.metric:14} {record.value:9.2f} {record.ratio:6.3f} of ipc")
    return 0


def _parts(settings: Settings) -> str:
    """Of a round trip and each of its parts: median and mean over all of them, us."""
    from afd_bench.wire_gpu_torch import Parts, measure_parts

    found = [astuple(parts) for parts in measure_parts(replace(settings, trace=True))]
    named = {"whole": [sum(parts) for parts in found]}
    for field, times in zip(fields(Parts), zip(*found, strict=True), strict=True):
        named[field.name] = list(times)
    return ", ".join(f"{n} {median(t):.1f} (mean {mean(t):.1f})" for n, t in named.items())


def records(cells: Sequence[Cell], host: str, command: str, day: str) -> list[Record]:
    """One record per cell that ipc was measured for too; ratio above 1: faster than ipc."""
    ipc = {(c.depth, c.metric): c.p50 for c in cells if c.backend == PEER}
    return [
        Record(
            bench="wire_gpu",
            case=cell.case,
            metric=cell.metric,
            value=round(cell.p50, 2),
            unit="us",
            peer=PEER,
            peer_value=round(ipc[cell.depth, cell.metric], 2),
            ratio=round(ipc[cell.depth, cell.metric] / cell.p50, 3),
            machine=host,
            command=command,
            date=day,
        )
        for cell in cells
        if cell.backend != PEER and (cell.depth, cell.metric) in ipc
    ]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench wire_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        nargs="+",
        default=["cuda:0"],
        help="of both sides, or of attention and of the FFN; cpu: to test the code",
    )
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 3], help="of the steps")
    parser.add_argument("--gbps", type=int, default=400, help="rate of the emulated NIC, Gb/s")
    parser.add_argument(
        "--no-bytes",
        action="store_true",
        help="the emulated NIC keeps the time of its line and copies nothing: a NIC copies by DMA,"
        " cores and a GPU's driver are slower",
    )
    parser.add_argument("--work-us", type=float, default=150.0, help="per position and side")
    parser.add_argument("--up", type=int, default=UP, help="bytes of a message to the FFN")
    parser.add_argument("--down", type=int, default=DOWN, help="bytes of an answer")
    parser.add_argument(
        "--connections", nargs="+", type=int, default=[0], choices=range(9),
        help="of tcp; 0: as many as the library takes",
    )  # fmt: skip
    parser.add_argument("--positions", type=int, default=96, help="per micro-batch in a graph")
    parser.add_argument("--replays", type=int, default=100, help="timed replays per case")
    parser.add_argument("--parts", action="store_true", help="where a round trip's time goes")
    parser.add_argument("--library", type=Path, help="compiled fake_ibverbs.cc")
    parser.add_argument("--out", type=results_file, help="file of the records")
    args = parser.parse_args(argv)
    if len(args.device) > 2:
        parser.error("--device takes one device for both sides, or two")
    return args
