"""`afd bench planner`: the planner against what was measured end to end, and where AFD wins.

Two parts, both arithmetic over data in the repository:
- ``errors``: predicts every step and ratio of docs/results/gpu.json and gpu_h100.json, and the
  steps of host.json;
- ``map``: AFD over the best colocated plan for five models, five kinds of GPUs, 8 to 256 GPUs,
  contexts of 1K to 128K and TPOT limits of 20, 50 and 100 ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from afd.records import Record, command_line, machine, read_records, replace_records, today
from afd_bench.planner.cells import (
    alike_places,
    host_cells,
    lengths_cells,
    ratio_cells,
    stage_tables,
    step_cells,
)
from afd_bench.planner.compare import (
    Error,
    colocated_errors,
    lengths_errors,
    ratio_errors,
    step_errors,
)
from afd_bench.planner.map import (
    MODELS,
    POOLS,
    MapCell,
    largest,
    map_cells,
    write_csv,
)
from afd_bench.planner.page import errors_page, map_page
from afd_bench.planner.simulated import Simulated, simulated
from afd_planner.cost.shape import Efficiency, calibrated
from afd_planner.facts.hardware import load_accelerator

METRICS = {
    "errors": ("step_error", "ratio_error", "winner_right"),
    "map": ("modelled_gain", "simulated_step"),
}
PARTS = tuple(METRICS)
RESULTS = ("gpu.json", "gpu_h100.json")
"""Files of `afd bench gpu` with steps and ratios; one per kind of GPU, because cases do not name
it."""
MEASURED = "measured (docs/results)"
COLOCATED = "best colocated plan"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="afd bench planner", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("docs/results"),
        help="folder of the measured records; what is found is written there too",
    )
    args = parser.parse_args(argv)
    if "errors" in args.parts and not (args.out / RESULTS[0]).exists():
        parser.error(f"--out {args.out} has no {RESULTS[0]}: give docs/results, or a copy of it")
    command = command_line("planner", argv)
    records: list[Record] = []
    if "errors" in args.parts:
        fitted, defaults = found_errors(args.out)
        records += [_error_record(metric, error, command) for metric, error in fitted]
        records += winner_records(fitted, command)
        page = errors_page(fitted, defaults)
        (args.out / "planner.md").write_text(page, encoding="utf-8")
    if "map" in args.parts:
        cells = list(map_cells())
        write_csv(args.out / "planner_map.csv", cells)
        _plot(args.out / "planner_map.png", cells)
        runs = list(simulated(cells))
        (args.out / "planner_map.md").write_text(map_page(cells, runs), encoding="utf-8")
        records += [*_map_records(cells, command), *_simulated_records(runs, command)]
    file = args.out / "planner.json"
    renewed = {metric for part in args.parts for metric in METRICS[part]}
    # Cells that are no longer compared, and plans that are no longer the largest, go.
    kept = [record for record in read_records(file) if record.metric not in renewed]
    replace_records(file, [*records, *kept])
    print(f"{len(records)} records written to {file}")
    return 0


Errors = list[tuple[str, Error]]
"""(metric, error) of every cell; metrics are step_error and ratio_error."""


def found_errors(results: Path, *, kernels: bool = True) -> tuple[Errors, Errors]:
    """Returns the errors with the efficiencies of each accelerator, and with the defaults. All
    requests of a cell were equally long, but for the cells of mixed lengths.

    results: the folder docs/results. kernels: as measured, where they were; else rooflines.
    """
    files = [read_records(results / name) for name in RESULTS]
    steps = [cell for records in files for cell in step_cells(records)]
    ratios = [cell for records in files for cell in ratio_cells(records)]
    lengths = [cell for records in files for cell in lengths_cells(records)]
    tables, alike = stage_tables(steps), alike_places([*steps, *ratios])
    all_steps = (*steps, *host_cells(read_records(results / "host.json")))

    def errors(efficiency: Callable[[str], Efficiency]) -> Errors:
        steps = (
            *step_errors(all_steps, tables, alike, efficiency),
            *colocated_errors(ratios, alike, efficiency),
            *lengths_errors(lengths, efficiency),
        )
        return [
            *(("step_error", error) for error in steps),
            *(("ratio_error", error) for error in ratio_errors(ratios, alike, efficiency)),
        ]

    @cache
    def fitted(gpu: str) -> Efficiency:
        found = replace(calibrated((load_accelerator(gpu),)), equal_lengths=True)
        return found if kernels else replace(found, kernels=False)

    return errors(fitted), errors(lambda gpu: Efficiency())


def winner_records(errors: Errors, command: str) -> list[Record]:
    """Returns, per ratio, 1 if the prediction names the side that won, else 0."""
    return [
        _record(
            error.cell,
            "winner_right",
            float((error.predicted > 1) == (error.measured > 1)),
            "1 if right",
            "aim",
            1.0,
            command,
        )
        for metric, error in errors
        if metric == "ratio_error"
    ]


def _error_record(metric: str, error: Error, command: str) -> Record:
    return _record(
        f"{error.cell} ({error.method})",
        metric,
        error.predicted * (1e3 if metric == "step_error" else 1),
        "ms" if metric == "step_error" else "x",
        MEASURED,
        error.measured * (1e3 if metric == "step_error" else 1),
        command,
    )


def _map_records(cells: Sequence[MapCell], command: str) -> list[Record]:
    found = []
    for model in MODELS:
        for pools in POOLS:
            cell = largest(cells, model, pools)
            if cell is not None:
                case = (
                    f"{model} on {cell.gpus} {pools}, {cell.context_k}K, TPOT {cell.tpot_ms} ms,"
                    f" {cell.plan}: largest modelled gain"
                )
                found.append(
                    _record(case, "modelled_gain", cell.ratio, "x", COLOCATED, 1.0, command)
                )
    return found


def _simulated_records(runs: Sequence[Simulated], command: str) -> list[Record]:
    return [
        _record(
            f"{run.cell.model} on {run.cell.gpus} {run.cell.pools}, {run.cell.plan}, jitter",
            "simulated_step",
            run.noisy * 1e3,
            "ms",
            "planned step",
            run.planned * 1e3,
            command,
        )
        for run in runs
    ]


def _record(
    case: str, metric: str, value: float, unit: str, peer: str, peer_value: float, command: str
) -> Record:
    """``ratio`` is 1 for a perfect prediction and less for any error; for gains, the gain."""
    ratio = value / peer_value
    if metric != "modelled_gain":
        ratio = min(ratio, 1 / ratio) if ratio else 0.0
    return Record(
        "planner", case, metric, value, unit, peer, peer_value, ratio, machine(), command, today()
    )


def _plot(path: Path, cells: Sequence[MapCell]) -> None:
    from afd_bench.planner.plot import map_png

    path.write_bytes(map_png(cells))
