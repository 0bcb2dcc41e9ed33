"""`afd bench moe`: MoE layers at decode shapes, ours against vLLM's fused experts and the roofline.

    afd bench moe --shapes all                      a GPU: eager calls and replayed graphs
    afd bench moe --tune --seconds 540              search tiles first, then measure with them
    afd bench moe --device cpu --shapes tiny        a check that everything works here

Our backends get rows in the wire's format: FP8 for FP8 weights, MXFP4 for MXFP4 weights. vLLM gets
bfloat16 rows, as colocated vLLM does, and quantises them itself. Several layers take turns, so that
weights come from memory. The roofline is the time of the necessary bytes and FLOPs at the rates
that this machine reaches in a large copy and a large matrix product. These run interleaved with the
layers, because a GPU at its power limit changes its clock with the load. Results are compared with
a float32 reference before they are timed.
"""

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from afd.devices import DEVICES, device_named
from afd.errors import ConfigError
from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench.moe.measure import Cell
from afd_bench.moe.run import Run, TuneOptions

SCHEMES = ("plain", "fp8_block", "mxfp4")
MODES = ("eager", "graph", "streams")
CPU_ROWS = (1, 64, 256)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="afd bench moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=tuple(DEVICES), default="cuda", help="where to run")
    parser.add_argument("--shapes", default="all", help="all, tiny, or comma-separated names")
    parser.add_argument(
        "--schemes",
        default=",".join(SCHEMES),
        metavar="NAME,...",
        help="weight formats; default: all",
    )
    parser.add_argument(
        "--modes", default="eager,graph", metavar="NAME,...", help="some of " + ", ".join(MODES)
    )
    parser.add_argument(
        "--rows", default="", metavar="N,...", help="rows per call; default: 64 to 8192"
    )
    parser.add_argument(
        "--tune",
        nargs="?",
        const="all",
        choices=("all", "backends"),
        help="find the fastest tiles and backends (or only backends); write ffn_worker/data/tuning",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=540.0,
        help="start no cell after this; --tune uses about half",
    )
    parser.add_argument(
        "--out", type=results_file, default=None, help="default: docs/results/moe.json"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    schemes = args.schemes.split(",")
    if not set(schemes) <= set(SCHEMES):
        raise ConfigError(f"--schemes {args.schemes} is unknown; use some of {', '.join(SCHEMES)}")
    if not set(args.modes.split(",")) <= set(MODES):
        raise ConfigError(f"--modes {args.modes} is unknown; use some of {', '.join(MODES)}")
    rows = _rows(args.rows)
    out = args.out
    if out is None:  # results of a CPU are not published
        out = Path("docs/results/moe.json") if device_named(args.device).has_streams else None
    command = command_line("moe", argv)
    started = time.monotonic()
    rows = rows or (CPU_ROWS if device_named(args.device).host_memory else ())
    run = Run(args.device, args.shapes, schemes, rows, tuple(args.modes.split(",")))
    tuned = TuneOptions(command, today(), tiles=args.tune == "all") if args.tune else None
    where, cells = machine(), []
    print(run.description())
    print(HEAD)
    for cell in run.cells(started + args.seconds, tuned):
        cells.append(cell)
        print(line(cell), flush=True)
        if out is not None:
            write_records(out, records(cell, where, command))
    for left in run.left_out:
        print(f"not measured within --seconds {args.seconds:g}: {left}")
    for failure in run.failed:
        print(f"failed: {failure}")
    if out is not None:
        out.with_suffix(".md").write_text(page(cells, command, run.description()), encoding="utf-8")
    return 1 if run.failed else 0


def _rows(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        rows = (0,)
    if any(count < 1 for count in rows):
        raise ConfigError(f"--rows {text} must be whole numbers above 0, such as 64,2048")
    return rows


def records(cell: Cell, where: str, command: str) -> list[Record]:
    """Latency of ours against each peer.

    ratio = peer's time / ours: higher is better. Against the roofline, it is the fraction reached.
    If several backends of ours were measured, each is a peer too.
    """
    case = f"{cell.shape} {cell.scheme} {cell.rows} rows {cell.mode}"
    peers = {"vllm": cell.vllm_us, "roofline": cell.roofline_us, "shared apart": cell.apart_us}
    peers |= cell.times if len(cell.times) > 1 else {}
    return [
        Record(
            bench="moe",
            case=case,
            metric="latency",
            value=round(cell.us, 2),
            unit="us",
            peer=peer,
            peer_value=round(us, 2),
            ratio=round(us / cell.us, 3),
            machine=where,
            command=command,
            date=today(),
        )
        for peer, us in peers.items()
        if us is not None
    ]


HEAD = """\
| shape | weights | rows | mode | ours | us | vLLM us | ratio | Triton us | DeepGEMM us | shared apart us | roofline us | of it | bound | copy TB/s | product TFLOP/s | error |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def line(cell: Cell) -> str:
    """One row of the table."""
    vllm = "" if cell.vllm_us is None else f"{cell.vllm_us / cell.us:.2f}"
    copy, product = cell.ceilings.bytes_per_s / 1e12, cell.ceilings.flops_per_s / 1e12
    return (
        f"| {cell.shape} | {cell.scheme} | {cell.rows} | {cell.mode} | {cell.ours} | {cell.us:.1f} "
        f"| {_us(cell.vllm_us)} | {vllm} | {_us(cell.times.get('triton'))} "
        f"| {_us(cell.times.get('deep_gemm'))} | {_us(cell.apart_us)} | {cell.roofline_us:.1f} "
        f"| {cell.roofline_us / cell.us:.0%} | {cell.bound} | {copy:.2f} | {product:.3g} "
        f"| {cell.error:.1e} |"
    )


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def page(cells: Sequence[Cell], command: str, words: str) -> str:
    """Text of docs/results/moe.md."""
    lost = [c for c in cells if c.vllm_us is not None and c.vllm_us < c.us]
    compared = sum(c.vllm_us is not None for c in cells)
    return "\n".join(
        [
            "# MoE layers",
            "",
            f"`{command}`, {machine()}, {today()}. {words}",
            "",
            f"vLLM is faster in {len(lost)} of {compared} cells.",
            "",
            HEAD,
            *(line(cell) for cell in cells),
            "",
        ]
    )
