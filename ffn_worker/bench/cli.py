"""`afd bench moe`: MoE layers at decode shapes, ours against vLLM's fused experts and the roofline.

    afd bench moe --shapes all                      a GPU: eager calls and replayed graphs
    afd bench moe --tune --seconds 540              search tiles first, then measure with them
    afd bench moe --device cpu --shapes tiny        this host: does everything work?

Ours gets rows as the wire brings them (FP8 for FP8 weights, MXFP4 for MXFP4); vLLM gets bfloat16
rows, as colocated vLLM has, and quantises them itself. Weights of several layers take turns, so
that they come from memory. The roofline is the time of the bytes and FLOPs that nobody can avoid at
what a large copy and a large matrix product reach, which take turns with the layers: a GPU at its
power limit has another clock for each load. Results are compared with a float32 reference before
they are timed.
"""

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from afd.bench.records import Record, machine, results_file, today, write_records
from afd.errors import ConfigError
from ffn_worker.bench.measure import Cell
from ffn_worker.bench.run import Run, Tuned

SCHEMES = ("plain", "fp8_block", "mxfp4")
MODES = ("eager", "graph", "streams")
CPU_ROWS = (1, 64, 256)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="afd bench moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", default="all", help="all, tiny, or names with commas")
    parser.add_argument("--schemes", default=",".join(SCHEMES), metavar="NAME,...")
    parser.add_argument(
        "--modes", default="eager,graph", metavar="NAME,...", help="of " + ", ".join(MODES)
    )
    parser.add_argument("--rows", default="", metavar="N,...", help="64 to 8192 by default")
    parser.add_argument(
        "--tune",
        nargs="?",
        const="all",
        choices=("all", "backends"),
        help="search tiles, then the quickest backends (or these alone), write configs/tuning",
    )
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="begin nothing after this; --tune: about half"
    )
    parser.add_argument(
        "--out", type=results_file, default=None, help="default: docs/results/moe.json"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    schemes = args.schemes.split(",")
    if not set(schemes) <= set(SCHEMES):
        raise ConfigError(f"--schemes {args.schemes}: use of {', '.join(SCHEMES)}")
    if not set(args.modes.split(",")) <= set(MODES):
        raise ConfigError(f"--modes {args.modes}: use of {', '.join(MODES)}")
    rows = _rows(args.rows)
    out = args.out
    if out is None:  # a host without a GPU has nothing to publish
        out = Path("docs/results/moe.json") if args.device == "cuda" else None
    command = "afd bench moe " + " ".join(_without_out(argv))
    started = time.monotonic()
    rows = rows or (CPU_ROWS if args.device == "cpu" else ())
    run = Run(args.device, args.shapes, schemes, rows, tuple(args.modes.split(",")))
    tuned = Tuned(command, today(), tiles=args.tune == "all") if args.tune else None
    where, cells = machine(), []
    print(run.words())
    print(HEAD)
    for cell in run.cells(started + args.seconds, tuned):
        cells.append(cell)
        print(line(cell), flush=True)
        if out is not None:
            write_records(out, records(cell, where, command))
    for left in run.left_out:
        print(f"left out, --seconds {args.seconds:g} were over: {left}")
    for failure in run.failed:
        print(f"failed: {failure}")
    if out is not None:
        out.with_suffix(".md").write_text(page(cells, command, run.words()), encoding="utf-8")
    return 1 if run.failed else 0


def _without_out(argv: Sequence[str]) -> list[str]:
    """What was asked for, without where the results went."""
    words = iter(argv)
    kept = []
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return kept


def _rows(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        rows = (0,)
    if any(count < 1 for count in rows):
        raise ConfigError(f"--rows {text} must be whole numbers above 0, such as 64,2048")
    return rows


def records(cell: Cell, where: str, command: str) -> list[Record]:
    """Latency of ours against each peer; ratio = peer's time over ours, so that more is better:
    against the roofline it is the part of it that is reached. Where several backends of ours were
    measured, all are peers too: one is what was taken."""
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
    """docs/results/moe.md."""
    lost = [c for c in cells if c.vllm_us is not None and c.vllm_us < c.us]
    compared = sum(c.vllm_us is not None for c in cells)
    return "\n".join(
        [
            "# MoE layers",
            "",
            f"`{command}`, {machine()}, {today()}. {words}",
            "",
            f"vLLM is quicker in {len(lost)} of {compared} cells.",
            "",
            HEAD,
            *(line(cell) for cell in cells),
            "",
        ]
    )
