"""`afd bench simulator`: compares the simulator with measurements.

Parts:
- ``served``: a real 1A1F deployment on this host (afd_bench/simulator_served.py).
- ``arrivals``: a real deployment under arriving requests (afd_bench/simulator_arrivals.py).
- ``paper``: Table 8 of the Step-3 report, from the files in afd_planner/data/simulate.
- ``points``: plans of the planner's map under load (afd_bench/simulator_points.py).
- ``scale``: the run time of simulating the largest deployments.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.records import Record, machine, results_file, today, write_records
from afd_bench import simulator_arrivals as arrivals
from afd_bench.arrivals_run import measure
from afd_bench.planner.map import largest, read_csv
from afd_bench.simulator_points import GPUS, MODELS, point_cases, points_table
from afd_bench.simulator_served import measure_run, simulated, table
from afd_planner.facts.files import DATA
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import Spec, load_spec, parse_spec

SPECS = DATA / "simulate"
TABLE_8 = {"step3-2a2f": 4039, "step3-3a2f": 3321, "step3-4a2f": 2643, "step3-16a2f": 898}
SCALE_S = 60.0
METRIC = "tokens_per_s_per_gpu"
MAP = Path("docs/results/planner_map.csv")


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
        "arrivals": lambda: _arrivals(args, command),
        "paper": _paper,
        "points": _points,
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
    parser.add_argument("--turns", type=int, default=3, help="repetitions of the served parts")
    parser.add_argument(
        "--layouts", nargs="+", default=["1A1F", "2A2F"], metavar="XAYF", help="arrivals part"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[2, 4, 8], help="requests/s, arrivals part"
    )
    parser.add_argument(
        "--arrivals-run",
        type=Path,
        default=Path("docs/results/simulator_arrivals"),
        metavar="DIR",
        help="folder for the runs of the arrivals part",
    )
    names = ("served", "arrivals", "paper", "points", "scale")
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


def _arrivals(args: argparse.Namespace, command: str) -> list[Cell]:
    found = []
    for layout in args.layouts:
        folder = args.arrivals_run / layout
        x, y = (int(number) for number in layout.rstrip("F").split("A"))
        measure(args.model, (x, y), args.rates, args.turns, command, folder)
        found += arrival_cells(folder)
    print(arrivals.table(args.arrivals_run))
    return found


def arrival_cells(folder: Path) -> list[Cell]:
    """Returns the cells of a saved run of the arrivals part, of the turn with the median ratio.

    For times, less is not better here: the ratio is simulated over measured.
    """
    return [
        Cell(
            f"qwen3_moe bench bfloat16 {folder.name} {cell.rate:g} requests/s, prefill and decode",
            cell.metric,
            cell.simulated,
            "tokens/s" if cell.metric == "tokens_per_s" else "s",
            "measured",
            cell.measured,
        )
        for cell in arrivals.cells(folder)
    ]


def _paper() -> list[Cell]:
    found = []
    for name, printed in TABLE_8.items():
        spec = load_spec(SPECS / f"{name}.yaml")
        rate = simulate(spec).tokens_per_s_per_gpu
        source = "Step-3 report, 7.3" if name == "step3-16a2f" else "Step-3 report, Table 8"
        found.append(Cell(spec.name, METRIC, rate, "tokens/s", source, float(printed)))
    return found


def _points() -> list[Cell]:
    """Simulates the plan with the largest gain of each model; the peer is the planner."""
    known = read_csv(MAP)
    chosen = [largest(known, model, GPUS) for model in MODELS]
    cases = list(point_cases([cell for cell in chosen if cell]))
    print(points_table(cases))
    found = []
    for case in cases:
        name = f"{case.cell.model} on {case.cell.gpus} {GPUS}, {case.cell.plan}: {case.condition}"
        rate = case.result.tokens_per_s_per_gpu
        found += [
            Cell(name, "tpot", case.tpot_s, "s", "planned step", case.planned_s, True),
            Cell(name, METRIC, rate, "tokens/s", "planned", case.planned_per_gpu),
        ]
    return found


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
