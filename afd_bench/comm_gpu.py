"""`afd bench comm --device cuda`: round trips between two GPUs of this host.

Three measurements:
- Round trips of AFD's ipc transport, of two bare copies of the same bytes (about the lower limit)
  and of NCCL send/recv, enqueued eagerly and replayed from a graph. The first case is the traffic
  of one attention GPU of 2A2F in the Step-3 report: 128 rows of 7168, FP8 up and BF16 down.
- The slowdown of a large GEMM that runs concurrently, and the number of kernels that the transfers
  launch.
- Three micro-batches in flight, with about 100 us of computation per micro-batch on each side.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from afd.errors import AfdError
from afd.records import Record, gpu_names, machine, results_file, today, write_records

PAPER = (917_504, 1_835_008)
SIZES = (PAPER, (64, 64), (14_336, 14_336), (917_504, 917_504), (14_700_000, 14_700_000))
ROUNDS = 100_000
OTHER_ROUNDS = 5_000
PIPELINED_ROUNDS = 20_000
TIMEOUT_S = 540
PEERS = {"copies": "bare copies", "nccl": "NCCL send/recv"}

Cells = dict[tuple[str, str, int, int], dict[str, float]]
"""(way, mode, up, down) -> fields of comm_gpu_torch.Cell."""
Contentions = list[dict[str, float | str]]
"""Fields of comm_gpu_torch.Contention."""
InFlight = list[dict[str, float]]
"""Fields of comm_gpu_pipeline_torch.Pipelined; empty if ipc was not measured."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="afd bench comm --device cuda", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="round trips of the first case")
    parser.add_argument(
        "--ways", default="ipc,copies,nccl", metavar="NAME,...", help="what to measure"
    )
    parser.add_argument(
        "--connections",
        type=int,
        help="CUDA_DEVICE_MAX_CONNECTIONS of both processes (CUDA's default: 8)",
    )
    parser.add_argument(
        "--out",
        type=results_file,
        default=Path("docs/results/comm_gpu.json"),
        help="file of the records; the page gets the same name with .md",
    )
    args = parser.parse_args(argv)
    if len(gpu_names()) < 2:
        raise AfdError("this benchmark needs two NVIDIA GPUs on one host; use --device cpu")
    if args.rounds < 100:
        raise AfdError(f"--rounds {args.rounds} is too few for a 99th percentile; use 100 or more")
    cells, contentions, in_flight = run(args.rounds, args.ways.split(","), args.connections)
    command = f"afd bench comm --device cuda --rounds {args.rounds}"
    where = ""
    if args.connections is not None:
        command += f" --connections {args.connections}"
        where = f", CUDA_DEVICE_MAX_CONNECTIONS={args.connections}"
    records = [
        *time_records(cells, where, command),
        *contention_records(contentions, where, command),
        *in_flight_records(in_flight, where, command),
    ]
    write_records(args.out, records)
    text = table(cells, contentions, in_flight, command)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def run(
    rounds: int, ways: Sequence[str], connections: int | None
) -> tuple[Cells, Contentions, InFlight]:
    """Measures in two processes. Raises AfdError if they fail or exceed TIMEOUT_S."""
    settings = {
        "sizes": SIZES,
        "rounds": [rounds] + [min(rounds, OTHER_ROUNDS)] * (len(SIZES) - 1),
        "devices": (0, 1),
        "ways": ways,
        "contended": PAPER,
        "pipelined": min(rounds, PIPELINED_ROUNDS),
    }
    environment = dict(os.environ)
    if connections is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cells.json"
        worker = [sys.executable, "-m", "afd_bench.comm_gpu_torch", json.dumps(settings), str(out)]
        try:
            done = subprocess.run(worker, env=environment, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise AfdError(f"the benchmark took over {TIMEOUT_S} s; lower --rounds") from None
        if done.returncode != 0:
            raise AfdError("a process of the benchmark failed; see its message above")
        found = json.loads(out.read_text(encoding="utf-8"))
    cells = {(c["way"], c["mode"], c["up"], c["down"]): c for c in found["cells"]}
    return cells, found["contentions"], found["pipelined"]


def time_records(cells: Cells, where: str, command: str) -> list[Record]:
    """Returns p50, mean, p99, max and GBps of ours against each peer; ratio = peer's time / ours.

    where: suffix of the case's name that describes the run's environment.
    """
    records = []
    for (way, mode, up, down), ours in cells.items():
        if way != "ipc":
            continue
        for peer, words in PEERS.items():
            theirs = cells.get((peer, mode, up, down))
            if theirs is None:
                continue
            case = f"ipc {up}/{down}, {mode}{where}"
            for metric in ("p50", "mean", "p99", "max"):
                value, peer_value = ours[metric], theirs[metric]
                records.append(_record(case, metric, "us", value, words, peer_value, command))
            rate = [(up + down) / (c["p50"] * 1000) for c in (ours, theirs)]
            records.append(
                _record(case, "GBps", "GB/s", rate[0], words, rate[1], command, more_is_better=True)
            )
    return records


def contention_records(contentions: Contentions, where: str, command: str) -> list[Record]:
    """Returns the records of the contention measurement.

    gemm_slowdown, round_slowdown: time while both run concurrently / time alone.
    kernels_per_50_rounds: kernels that the transfers launch.
    """
    by_way = {b["way"]: b for b in contentions}
    if not {"ipc", "nccl"} <= set(by_way):
        return []
    words = PEERS["nccl"]
    case = f"ipc {PAPER[0]}/{PAPER[1]}, graph{where}, beside a GEMM"
    records = []
    for metric, over, under, unit in (
        ("gemm_slowdown", "gemm_loaded_ms", "gemm_alone_ms", "x"),
        ("round_slowdown", "round_loaded_us", "round_alone_us", "x"),
    ):
        ours, theirs = (float(by_way[w][over]) / float(by_way[w][under]) for w in ("ipc", "nccl"))
        records.append(_record(case, metric, unit, ours, words, theirs, command))
    # Add one to both: zero kernels would make the ratio infinite.
    ours, theirs = (float(by_way[w]["kernels"]) for w in ("ipc", "nccl"))
    kernels = _record(
        case, "kernels_per_50_rounds", "kernels", ours + 1, words, theirs + 1, command
    )
    records.append(replace(kernels, value=ours, peer_value=theirs))
    return records


def in_flight_records(in_flight: InFlight, where: str, command: str) -> list[Record]:
    """Returns p50, p99 and max of a micro-batch with transfers against computation alone."""
    return [
        _record(
            f"ipc {p['up']}/{p['down']}, graph{where}, 3 in flight behind computing",
            metric,
            "us",
            p[metric],
            "the computing alone",
            p[f"alone_{metric}"],
            command,
        )
        for p in in_flight
        for metric in ("p50", "p99", "max")
    ]


def _record(
    case: str,
    metric: str,
    unit: str,
    value: float,
    peer: str,
    peer_value: float,
    command: str,
    *,
    more_is_better: bool = False,
) -> Record:
    ratio = value / peer_value if more_is_better else peer_value / value
    numbers = (round(value, 3), unit, peer, round(peer_value, 3), round(ratio, 3))
    return Record("comm", case, metric, *numbers, machine(), command, today())


def table(cells: Cells, contentions: Contentions, in_flight: InFlight, command: str) -> str:
    """Returns the page that belongs to the records."""
    lines = [
        "# Transport between two GPUs",
        "",
        f"{machine()}. {today()}, `{command}`.",
        "",
        "Round trips in us: one message up, then one down, in order on one stream, timed by events",
        "on the GPU. *copies*: one side makes two bare copies of the same bytes, without",
        "notification. *nccl*: send/recv. NCCL's PutSignal, which needs no SM, came with 2.29; the",
        "NCCL of this machine is older.",
        "",
        "| bytes up / down | mode | way | rounds | p50 | mean | p99 | max | p99/p50 |"
        " p50 copies / p50 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (way, mode, up, down), c in cells.items():
        limit = cells.get(("copies", mode, up, down))
        ratio = f"{limit['p50'] / c['p50']:.2f}" if limit else ""
        lines.append(
            f"| {up} / {down} | {mode} | {way} | {c['rounds']} | {c['p50']:.1f} | {c['mean']:.1f} "
            f"| {c['p99']:.1f} | {c['max']:.1f} | {c['p99'] / c['p50']:.2f} | {ratio} |"
        )
    lines += [
        "",
        f"A bf16 GEMM (8192 x 8192 x 8192) and round trips of {PAPER[0]} / {PAPER[1]} bytes",
        "(graph), alone and concurrently; *kernels*: kernels that 50 round trips launch per side:",
        "",
        "| way | GEMM alone, ms | concurrent | slowdown | round alone, us | concurrent | slowdown |"
        " kernels |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for b in contentions:
        gemm = [float(b[name]) for name in ("gemm_alone_ms", "gemm_loaded_ms")]
        trip = [float(b[name]) for name in ("round_alone_us", "round_loaded_us")]
        lines.append(
            f"| {b['way']} | {gemm[0]:.3f} | {gemm[1]:.3f} | {gemm[1] / gemm[0]:.3f} "
            f"| {trip[0]:.1f} | {trip[1]:.1f} | {trip[1] / trip[0]:.2f} | {b['kernels']} |"
        )
    lines += [
        "",
        "Three micro-batches in flight, with a GEMM per micro-batch on each side (graph): us from",
        "the end of one micro-batch to the end of the next on the attention side.",
        "",
        "| bytes up / down | micro-batches | | p50 | p99 | max | p99/p50 | added to the p50 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in in_flight:
        head = f"| {p['up']} / {p['down']} | {p['rounds']} "
        for words, prefix in (("computing alone", "alone_"), ("with transfers", "")):
            p50, p99, most = (p[prefix + metric] for metric in ("p50", "p99", "max"))
            added = f"{p50 - p['alone_p50']:.1f}" if not prefix else ""
            times = f"{p50:.1f} | {p99:.1f} | {most:.1f} | {p99 / p50:.2f}"
            lines.append(f"{head}| {words} | {times} | {added} |")
    return "\n".join(lines) + "\n"
