"""`afd bench simulator`: compares the simulator with measurements.

Three parts:
- ``served``: a real 1A1F deployment on this host (afd_bench/simulator_served.py).
- ``paper``: Table 8 of the Step-3 report, from the files in afd_planner/data/simulate.
- ``scale``: the run time of simulating the largest deployments.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.records import Record, machine, results_file, today, write_records
from afd_bench.simulator_served import measure_run, simulated, table
from afd_planner.facts.files import DATA
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import Spec, load_spec, parse_spec

SPECS = DATA / "simulate"
TABLE_8 = {"step3-2a2f": 4039, "step3-3a2f": 3321, "step3-4a2f": 2643, "step3-16a2f": 898}
SCALE_S = 60.0


@dataclass(frozen=True)
class Cell:
    """A simulated number and its peer value. Fields as in :class:`afd.records.Record`."""

    case: str
    metric: str
    value: float
    unit: str
    peer: str
    peer_value: float
    less_is_better: bool = False


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    command = ("afd bench simulator " + " ".join(argv)).strip()
    parts = {
        "served": lambda: _served(args, command),
        "paper": _paper,
        "scale": _scale,
    }
    for part in args.parts:
        records = [_record(cell, command) for cell in parts[part]()]
        for record in records:
            print(
                f"{record.case}: {record.value:.4g} {record.unit};"
                f" {record.peer} {record.peer_value:.4g} ({record.ratio:.3f}x)",
                flush=True,
            )
        write_records(args.out, records)
    return 0


def _record(cell: Cell, command: str) -> Record:
    ratio = cell.value / cell.peer_value
    if cell.less_is_better:
        ratio = 1 / ratio
    return Record(
        "simulator",
        cell.case,
        cell.metric,
        cell.value,
        cell.unit,
        cell.peer,
        cell.peer_value,
        ratio,
        machine(),
        command,
        today(),
    )


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench simulator", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/bench"), help="made if missing")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[8, 32], help="requests at a time, served part"
    )
    parser.add_argument("--turns", type=int, default=3, help="repetitions of the served part")
    names = ("served", "paper", "scale")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="parts to run")
    parser.add_argument("--out", type=results_file, default=Path("docs/results/simulator.json"))
    parser.add_argument(
        "--run",
        type=Path,
        default=Path("docs/results/simulator/run1"),
        metavar="DIR",
        help="folder for the stage times and throughputs of the served part",
    )
    return parser.parse_args(argv)


def _served(args: argparse.Namespace, command: str) -> list[Cell]:
    run = measure_run(args.model, tuple(args.batches), args.turns, command)
    run.save(args.run)
    print(table(args.run.parent))
    return [
        Cell(
            f"qwen3_moe bench bfloat16 1A1F batch{batch} depth{depth} {args.run.name}",
            "tokens_per_s",
            simulated(args.run, batch, depth),
            "tokens/s",
            "measured",
            statistics.median(rates),
        )
        for (batch, depth), rates in run.rates.items()
    ]


def _paper() -> list[Cell]:
    cells = []
    for name, printed in TABLE_8.items():
        spec = load_spec(SPECS / f"{name}.yaml")
        rate = simulate(spec).tokens_per_s_per_gpu
        source = "Step-3 report, 7.3" if name == "step3-16a2f" else "Step-3 report, Table 8"
        cells.append(
            Cell(spec.name, "tokens_per_s_per_gpu", rate, "tokens/s", source, float(printed))
        )
    return cells


def _scale() -> list[Cell]:
    """Measures the seconds to simulate 50 steps, and 20,000 requests, with jitter everywhere."""
    cells = []
    for x, y in ((1000, 1000), (10_000, 1000), (10_000, 10_000)):
        case = f"{x} attention + {y} FFN instances, 61 layers, depth 3, jitter, 50 steps"
        cells.append(_timed(case, large(x, y, steps=50)))
    spec = requests(9000, 1000, 20_000)
    case = "9000 attention + 1000 FFN instances, 61 layers, depth 3, jitter, 20000 requests"
    return [*cells, _timed(case, spec)]


def _timed(case: str, spec: Spec) -> Cell:
    started = time.monotonic()
    simulate(spec)
    return Cell(case, "wall_s", time.monotonic() - started, "s", "target", SCALE_S, True)


def requests(x: int, y: int, count: int) -> Spec:
    """Returns the spec of xAyF that serves ``count`` requests of 100 tokens within a second."""
    load = {
        "arrivals": {"kind": "poisson", "per_s": count},
        "count": count,
        "prompt": {"kind": "lognormal", "tokens": 4000, "spread": 0.5},
        "output": {"kind": "lognormal", "tokens": 100, "spread": 0.5},
        "prefill": "elsewhere",
    }
    constant = large(x, y, steps=1).model_dump(mode="json", exclude_unset=True)
    return parse_spec({**constant, "constant": None, "requests": load}, "requests")


def large(x: int, y: int, *, steps: int) -> Spec:
    """Returns the spec of xAyF, one accelerator per instance, with jitter on every stage."""
    noise = {"kind": "lognormal", "variation": 0.1}
    return parse_spec(
        {
            "name": f"{x}A{y}F",
            "attention": {"instances": x},
            "ffn": {"instances": y},
            "layers": 61,
            "times": {
                "attention": {"fixed_us": 100, "per_row_us": 1},
                "ffn": {"fixed_us": 200},
                "rest": {"fixed_us": 1000},
            },
            "wire": {
                "gbit_per_s": 400,
                "latency_us": 5,
                "out_bytes_per_row": 7168,
                "back_bytes_per_row": 14336,
                "delivery": "routed",
                "top_k": 8,
            },
            "jitter": {stage: noise for stage in ("attention", "ffn", "wire", "rest")},
            "constant": {"rows": 300, "context": 4096, "steps": steps},
        },
        "large",
    )
