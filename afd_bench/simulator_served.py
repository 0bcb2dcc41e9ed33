"""Compares a real 1A1F deployment with the simulator, which gets only stage times.

A run uses one deployment and several turns. Each turn, at each depth, first measures stage times
(as `afd bench stages` does) in steady decode and on prompts at the given batches. Then it sends and
times whole batches of requests. The simulator gets the requests and the stage times of the depth,
but no throughput.
"""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from afd.records import machine, today
from afd_bench.cpu import PROMPT_TOKENS, run_batch
from afd_bench.servers import disaggregated
from afd_bench.stage_points import Observed, points
from afd_bench.stages import Plan, observe, write
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import Spec, parse_spec

DEPTHS = (1, 2, 3)
TOKENS = 96
_CONTEXTS = (PROMPT_TOKENS, 2 * PROMPT_TOKENS)  # decode adds about 40 tokens to each
_WINDOW_S = 0.8
_PREFILLS = 2
_PROPAGATION_S = 0.5  # until the instances have received a new depth
_RUN = "run.json"


@dataclass(frozen=True)
class ServedRun:
    """One run.

    about: model, its layers and hidden size, machine, command, date. rates: output tokens/s of each
    turn, by (batch, depth). observed: stage times of each turn, by depth.
    """

    about: dict[str, str | int]
    rates: dict[tuple[int, int], list[float]]
    observed: dict[int, list[Observed]]

    def save(self, folder: Path) -> None:
        """Writes run.json and, per depth, a file of measured stage times."""
        for depth, observed in self.observed.items():
            command = f"{self.about['command']} (depth {depth})"
            write(stages_file(folder, depth), points(observed), str(self.about["model"]), command)
        cells = [
            {"batch": batch, "depth": depth, "tokens_per_s": [round(rate, 1) for rate in rates]}
            for (batch, depth), rates in self.rates.items()
        ]
        text = json.dumps({**self.about, "cells": cells}, indent=1)
        (folder / _RUN).write_text(text + "\n", encoding="utf-8")


def stages_file(folder: Path, depth: int) -> Path:
    """Returns the path of a run's stage times at a depth."""
    return folder / f"stages-depth{depth}.json"


def measure_run(model: Path, batches: tuple[int, ...], turns: int, command: str) -> ServedRun:
    """Starts the deployment and measures it; creates the model if it is missing."""
    if not (model / "config.json").exists():
        make_model("qwen3_moe", model, resolve("qwen3_moe", "bench"))
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = {
        "model": str(model.absolute()),
        "attention": {
            "max_model_len": 1024,
            "max_num_seqs": max(batches),
            "max_num_batched_tokens": 1024,
            "kv_cache_gib": 0.5,
            "dtype": "bfloat16",
        },
        "pipeline": {"depth": max(DEPTHS), "min_rows": 1},
    }
    about: dict[str, str | int] = {
        "model": model.name,
        "layers": int(settings["num_hidden_layers"]),
        "hidden": int(settings["hidden_size"]),
        "machine": machine(),
        "command": command,
        "date": today(),
    }
    rates: dict[tuple[int, int], list[float]] = {
        (batch, depth): [] for batch in batches for depth in DEPTHS
    }
    observed: dict[int, list[Observed]] = {depth: [] for depth in DEPTHS}
    print("starting 1A1F", flush=True)
    with disaggregated(config) as server:
        for depth in DEPTHS:  # warm up
            server.set_depth(depth)
            time.sleep(_PROPAGATION_S)
            for batch in batches:
                asyncio.run(run_batch(server, batch, 8, seed=1000 + depth))
        for turn in range(turns):
            for depth in DEPTHS:
                observed[depth].append(observe(server, _plan(batches, depth)))
                for batch in batches:
                    rate = asyncio.run(run_batch(server, batch, TOKENS, seed=turn * 10 + depth))
                    rates[batch, depth].append(rate)
                    print(f"batch {batch} depth {depth}: {rate:.0f} tokens/s", flush=True)
    return ServedRun(about, rates, observed)


def _plan(batches: tuple[int, ...], depth: int) -> Plan:
    return Plan(
        batches=batches,
        contexts=_CONTEXTS,
        prefill=tuple(batch * PROMPT_TOKENS for batch in batches),
        prompt=PROMPT_TOKENS,
        rounds=_PREFILLS,
        window_s=_WINDOW_S,
        depth=depth,
        longest=1023,
    )


def table(runs: Path) -> str:
    """Returns Markdown with a column per run in a folder.

    A cell has the simulated rate, the median of the measured turns (each turn), and their ratio.
    """
    names = sorted(folder.name for folder in runs.iterdir())
    rows: dict[tuple[int, int], list[str]] = {}
    for name in names:
        run = json.loads((runs / name / _RUN).read_text(encoding="utf-8"))
        for cell in run["cells"]:
            batch, depth, turns = cell["batch"], cell["depth"], cell["tokens_per_s"]
            rate, measured = simulated(runs / name, batch, depth), statistics.median(turns)
            each = ", ".join(f"{turn:.0f}" for turn in turns)
            text = f"{rate:.0f}, {measured:.0f} ({each}): **{rate / measured:.2f}**"
            rows.setdefault((batch, depth), []).append(text)
    lines = [["batch", "depth", *names], ["---"] * (2 + len(names))]
    lines += [[str(batch), str(depth), *cells] for (batch, depth), cells in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def simulated(folder: Path, batch: int, depth: int) -> float:
    """Returns the simulated output tokens/s of a saved run's requests on its stage times."""
    return simulate(_spec(folder, batch, depth)).tokens_per_s


def _spec(folder: Path, batch: int, depth: int) -> Spec:
    """Returns a spec with the requests of `afd bench cpu`: ``batch`` equal requests at once."""
    run = json.loads((folder / _RUN).read_text(encoding="utf-8"))
    row_bytes = 2 * int(run["hidden"])
    return parse_spec(
        {
            "name": f"batch {batch} depth {depth}",
            "attention": {"instances": 1},
            "ffn": {"instances": 1},
            "layers": int(run["layers"]),
            "depth": depth,
            "times": {"measured": str(stages_file(folder, depth))},
            "wire": {"out_bytes_per_row": row_bytes, "back_bytes_per_row": row_bytes},
            "requests": {
                "arrivals": {"kind": "together"},
                "count": batch,
                "prompt": {"tokens": PROMPT_TOKENS},
                "output": {"tokens": TOKENS},
                "max_batch": batch,
                "max_tokens": 1024,
            },
        },
        "simulator",
    )
