"""Compares a real deployment under arriving requests with the simulator, which gets stage times.

A run uses one deployment and several turns. Each turn measures stage times (as `afd bench stages`
does), and then sends requests at several Poisson rates (as `vllm bench serve` does), so that
prompts meet requests that decode. The simulator gets the moments and lengths of those requests and
the stage times of the same turn.

Two things about the load itself are measured beside it, because they are not about scheduling:

- The host is shared, and its speed differs between the windows and the load. The transport's trace
  of the load says by how much per stage (:func:`speeds`), and how the times vary from call to
  call.
- The way between client and scheduler (HTTP, gateway, queues between processes) takes longer on
  busy cores. It is the client's time to the first token less the engine's own
  (:func:`outside_s`), by vLLM's counters.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from afd_bench.arrivals_run import (
    DEPTH,
    MAX_BATCHED,
    MAX_NUM_SEQS,
    OUTPUT,
    PROMPT,
    RUN,
    measured,
    stages_name,
)
from afd_bench.open_loop import Sent
from afd_planner.cost.measured import load_measured
from afd_planner.simulate.engine import simulate
from afd_planner.simulate.spec import Spec, parse_spec


@dataclass(frozen=True)
class Cell:
    """One metric at one rate. Seconds, or output tokens/s.

    Attributes:
        simulated, measured: Of the turn with the median ratio.
        ratios: Simulated over measured of every turn, with the speeds of the load.
        plain: The same without them, with the stage times of the turn's windows as they are.
    """

    rate: float
    metric: str
    simulated: float
    measured: float
    ratios: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over the turns; the lower one of two."""
        return statistics.median_low(self.ratios)


Speeds = Mapping[int, Mapping[str, float]]
"""Factors on stage times, by the number of attention instances in a step."""


def speeds(folder: Path, number: int, rate: float) -> dict[int, dict[str, float]]:
    """Returns, per stage, its time during a load over that of the turn's windows, in all calls.

    A shared host runs other work at other times. Steps are told apart by the number of attention
    instances in them, as the windows are. Calls with more rows than a batch of decoding requests
    have prompts; their stages have factors of their own.
    """
    instances = _about(folder)["attention"]
    return {
        active: _speeds(folder, number, rate, active, instances)
        for active in range(1, instances + 1)
    }


def _speeds(
    folder: Path, number: int, rate: float, active: int, instances: int
) -> dict[str, float]:
    traced = read_traced(folder, number, rate)["active"][str(active)]
    table = load_measured(folder / stages_name(number, active, instances))
    assert table.prefill is not None
    context = statistics.mean((*PROMPT, *OUTPUT))
    most = math.ceil(MAX_NUM_SEQS / DEPTH)  # decode rows of a micro-batch on an instance

    def factor(calls: Sequence[Sequence[float]], at: Callable[[float], float]) -> float:
        took = sum(count * us * 1e-6 for _, count, us, _ in calls)
        return took / sum(count * at(rows) for rows, count, _, _ in calls) if calls else 1.0

    attention, ffn = traced["attention"], traced["ffn"]
    # The pause before a step may be one without requests, so long ones do not count.
    rest = [(rows, count, us, us) for rows, count, _, us in traced["rest"] if rows <= MAX_NUM_SEQS]
    prefill = table.prefill
    return {
        "attention": factor(
            [call for call in attention if call[0] <= most],
            lambda rows: table.t_attention(rows, context).seconds,
        ),
        "prefill": factor(
            [call for call in attention if call[0] > most],
            lambda rows: float(prefill.at(np.float64(rows))),
        ),
        "ffn": factor(
            [call for call in ffn if call[0] <= most * active],
            lambda rows: table.t_ffn(rows).seconds,
        ),
        "ffn_prefill": factor(
            [call for call in ffn if call[0] > most * active],
            lambda rows: table.t_ffn(rows).seconds,
        ),
        "rest": factor(rest, lambda rows: table.t_rest(rows).seconds),
    }


def simulated(folder: Path, number: int, rate: float, scale: Speeds) -> dict[str, float]:
    """Returns the same metrics of the simulated load of a saved turn.

    scale: factors on stage times.
    """
    spec = load_of(folder, number, rate, scale)
    result = simulate(spec)
    return {
        "engine_ttft_mean": result.engine_ttft.mean,
        "ttft_p50": result.ttft.p50,
        "tpot_p50": result.tpot.p50,
        "e2el_p50": result.e2el.p50,
        "tokens_per_s": result.tokens_per_s,
    }


def outside_s(folder: Path, number: int, rate: float) -> float:
    """Returns the mean seconds of a load's requests from sending until the scheduler sees them, and
    from the first token to the client."""
    sent = read_sent(folder, number, rate)
    whole = statistics.mean(one.ttft_s for one in sent)
    return max(0.0, whole - float(read_traced(folder, number, rate)["inside_s"]))


def _about(folder: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((folder / RUN).read_text(encoding="utf-8"))
    return about


def read_traced(folder: Path, number: int, rate: float) -> dict[str, Any]:
    """Returns the stages and ``inside_s`` of a load of a saved turn."""
    loads = json.loads((folder / f"traced-{number}.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = loads[f"{rate:g}"]
    return found


def read_sent(folder: Path, number: int, rate: float) -> list[Sent]:
    """Returns the requests of a load of a saved turn."""
    with (folder / f"sent-{number}-{rate:g}.csv").open(newline="", encoding="utf-8") as file:
        return [
            Sent(
                float(row["arrival_s"]),
                int(row["prompt"]),
                int(row["output"]),
                float(row["ttft_s"]),
                float(row["e2el_s"]),
            )
            for row in csv.DictReader(file)
        ]


def cells(folder: Path, rates: Sequence[float] = ()) -> list[Cell]:
    """Returns the cells of a saved run, by rate; ``rates``: only these, () for all."""
    turns = int(_about(folder)["turns"])
    names = {path.stem.rpartition("-")[2] for path in folder.glob("sent-0-*.csv")}
    found: list[Cell] = []
    for rate in rates or sorted(map(float, names)):
        real = [
            measured(read_sent(folder, n, rate), read_traced(folder, n, rate)["inside_s"])
            for n in range(turns)
        ]
        ours = [simulated(folder, n, rate, speeds(folder, n, rate)) for n in range(turns)]
        plain = [simulated(folder, n, rate, {}) for n in range(turns)]
        found += [_cell(rate, metric, ours, real, plain) for metric in real[0]]
    return found


def table(runs: Path) -> str:
    """Returns Markdown with a row per layout, rate and metric of the runs in a folder.

    A ratio is simulated over measured, the median of the turns (each turn).
    """
    lines = [
        "| layout | requests/s | metric | simulated | measured | ratio | ratio by windows alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder in sorted(path.parent for path in runs.glob(f"*/{RUN}")):
        lines += [table_line(folder.name, cell) for cell in cells(folder)]
    return "\n".join(lines)


def table_line(layout: str, cell: Cell) -> str:
    """Returns the row of :func:`table` for a cell."""
    values = (f"{value:.3g}" for value in (cell.simulated, cell.measured))
    each = ", ".join(f"{ratio:.2f}" for ratio in cell.ratios)
    words = [layout, f"{cell.rate:g}", cell.metric, *values]
    words += [f"**{cell.ratio:.2f}** ({each})", f"{statistics.median(cell.plain):.2f}"]
    return "| " + " | ".join(words) + " |"


def _cell(
    rate: float,
    metric: str,
    ours: Sequence[Mapping[str, float]],
    real: Sequence[Mapping[str, float]],
    plain: Sequence[Mapping[str, float]],
) -> Cell:
    ratios, without = _ratios(ours, real, metric), _ratios(plain, real, metric)
    middle = ratios.index(statistics.median_low(ratios))
    return Cell(rate, metric, ours[middle][metric], real[middle][metric], ratios, without)


def _ratios(
    ours: Sequence[Mapping[str, float]], real: Sequence[Mapping[str, float]], metric: str
) -> tuple[float, ...]:
    return tuple(one[metric] / other[metric] for one, other in zip(ours, real, strict=True))


def load_of(folder: Path, number: int, rate: float, scale: Speeds) -> Spec:
    """Returns the spec of a load of a turn, on that turn's stage times times ``scale``.

    With a scale, the times of attention and FFN vary as they did in the load. ``client_ms`` is what
    the time outside the scheduler is above the simulated wait for the end of a step.
    """
    calm = simulate(_load(folder, number, rate, scale, 0.0))
    wait_s = calm.ttft.mean - calm.engine_ttft.mean
    client_ms = 1e3 * max(0.0, outside_s(folder, number, rate) - wait_s)
    return _load(folder, number, rate, scale, client_ms)


def _load(folder: Path, number: int, rate: float, scale: Speeds, client_ms: float) -> Spec:
    about = _about(folder)
    instances = about["attention"]

    def times(active: int) -> dict[str, Any]:
        file = folder / stages_name(number, active, instances)
        return {"measured": str(file), "scale": dict(scale.get(active, {}))}

    fewer = [{"active": active, **times(active)} for active in range(1, instances)]
    row_bytes = 2 * int(about["hidden"])
    jitter = {}
    if scale:
        spread = read_traced(folder, number, rate)["spread"]
        jitter = {stage: {"kind": "values", "values": v} for stage, v in spread.items()}
    return parse_spec(
        {
            "name": f"turn {number}, {rate:g} requests/s",
            "attention": {"instances": instances},
            "ffn": {"instances": about["ffn"]},
            "layers": about["layers"],
            "depth": about["depth"],
            "times": {**times(instances), "fewer": fewer},
            "jitter": jitter,
            "wire": {"out_bytes_per_row": row_bytes, "back_bytes_per_row": row_bytes},
            "requests": {
                "arrivals": {"kind": "trace", "file": str(folder / f"sent-{number}-{rate:g}.csv")},
                "max_batch": MAX_NUM_SEQS,
                "max_tokens": MAX_BATCHED,
                "client_ms": client_ms,
            },
        },
        "simulator",
    )
