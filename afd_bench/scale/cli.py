"""`afd bench scale 40A24F`: a deployment of many processes on the CPU, without vLLM.

Every attention and FFN instance is a process, with the real control plane, transport (shared
memory), leader, heads and remote experts. Attention is a driver that sends a few rows of every
layer; the experts are tiny. Measured: the CPU time of the leader per step, start-up, steps per
second, the load of the control plane, and how long it takes until a killed instance that is started
again takes part.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from afd.records import command_line, machine, results_file, today, write_records
from afd_bench.scale.deployed import deployed
from afd_bench.scale.page import Cell, page, records
from afd_bench.scale.shared import ROWS, Case, LeaderTime, Rows
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve

FAMILY = "qwen3_moe"
LAYERS, HIDDEN, TOP_K = 2, 64, 2
_WARM_UP_STEPS = 3


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    cases = [Case.of(text) for text in args.cases]
    # First, because the deployments leave a busy machine behind.
    leaders = {case: announced(case) for case in map(Case.of, args.announced)}
    for case, took in leaders.items():
        print(f"{case.name} announce a step: leader {took.median_us:.0f} us", flush=True)
    cells = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="afd-scale-") as folder:
            cell = measured(case, Path(folder), args.seconds)
        cells.append(cell)
        print(cell.line, flush=True)
    command = command_line("scale", argv)
    write_records(args.out, records(cells, leaders, machine(), command, today()))
    text = page(cells, leaders, machine(), command, today())
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


def measured(case: Case, folder: Path, seconds: float) -> Cell:
    """Runs one case. folder: for the checkpoint."""
    checkpoint = _checkpoint(folder, case)
    load = os.getloadavg()[0]
    with deployed(case, checkpoint, rows_of(checkpoint)) as processes:
        start_s = processes.start()
        processes.await_steps(processes.attention, _WARM_UP_STEPS)
        window = processes.measure(seconds)
        back_s = {}
        # Not ffn-0, which leads.
        for name in (processes.attention[-1], *processes.ffn[1:][-1:]):
            processes.kill(name)
            others = [other for other in processes.attention if other != name]
            if name in processes.attention:
                processes.await_steps(others, 2)  # the others go on without it
            processes.start_member(name)
            waiting = [name] if name in processes.attention else processes.attention
            back_s[name.partition("-")[0]] = processes.await_steps(waiting)
    return Cell(case, start_s, window, back_s, load)


def announced(case: Case, steps: int = 1000) -> LeaderTime:
    """The leader's time for a step that all attention instances have announced."""
    from afd_bench.scale.announced_torch import leader_time

    with tempfile.TemporaryDirectory(prefix="afd-scale-") as folder:
        return leader_time(_checkpoint(Path(folder), case), case, steps)


def _checkpoint(folder: Path, case: Case) -> Path:
    """Makes a model with two experts per FFN instance."""
    sizes = resolve(
        FAMILY,
        "tiny",
        hidden=HIDDEN,
        layers=LAYERS,
        experts=max(2 * case.y, TOP_K),
        top_k=TOP_K,
        intermediate=HIDDEN,
        vocab=512,
    )
    make_model(FAMILY, folder / "model", sizes, dtype="float32")
    return folder / "model"


def rows_of(checkpoint: Path) -> list[Rows]:
    """Returns the rows of each MoE layer and their answers by the whole model."""
    from afd_bench.scale.reference_torch import reference

    rng = np.random.default_rng(0)
    forward, layers, experts = reference(checkpoint)
    out = []
    for layer in layers:
        x = rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)
        ids = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(ROWS)]).astype(np.int32)
        weights = rng.random((ROWS, TOP_K)).astype(np.float32)
        out.append(Rows(layer, x, ids, weights, forward(layer, x, ids, weights)))
    return out


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "cases", nargs="*", default=["2A2F", "8A4F", "40A24F"], help="topologies, such as 40A24F"
    )
    parser.add_argument(
        "--announced",
        nargs="*",
        default=["16A1F", "64A1F", "128A1F", "40A24F"],
        help="topologies whose attention instances announce steps to a leader",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of the measured window")
    parser.add_argument(
        "--out",
        type=results_file,
        default=Path("docs/results/scale.json"),
        help="file of the records; the page gets the same name with .md",
    )
    return parser.parse_args(argv)
