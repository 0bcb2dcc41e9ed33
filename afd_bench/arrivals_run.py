"""Measures a real deployment under arriving requests, for afd_bench/simulator_arrivals.py."""

from __future__ import annotations

import csv
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from afd.records import machine, today
from afd_bench.message_times import Samples, Times, times_of
from afd_bench.open_loop import Sent, poisson, send
from afd_bench.servers import Server, disaggregated
from afd_bench.stage_points import Observed, points
from afd_bench.stages import Plan, observe, write
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve

DEPTH = 2
MAX_NUM_SEQS = 16
MAX_BATCHED = 512
SECONDS = 10.0
"""Of sending, per rate and turn."""
PROMPT, OUTPUT = (32, 96), (16, 48)
"""Least and most tokens; uniform between them."""
_BATCHES = (1, 2, 4, 8, MAX_NUM_SEQS)
_PROMPTS = (32, 64, 128, 256)
_WINDOW_S = 0.8
_ROUNDS = 6
_LEAST = 8  # calls of as many rows, to count in the spread of times
_GROUPS = 200
_PAUSE = 4.0
"""Pauses between steps beyond this many medians are taken for pauses without requests."""
RUN = "run.json"
_INSIDE = ("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum")


@dataclass(frozen=True)
class Turn:
    """One turn.

    observed: stage times by the number of attention instances that have requests, up to all.
    sent: the requests at each rate (requests/s). traced: the stages during them, by the same
    number. inside: the mean seconds of a request from the engine's queue to its first token.
    """

    observed: dict[int, Observed]
    sent: dict[float, list[Sent]]
    traced: dict[float, dict[int, Times]]
    inside: dict[float, float]


def measure(
    model: Path,
    layout: tuple[int, int],
    rates: Sequence[float],
    turns: int,
    command: str,
    out: Path,
) -> None:
    """Starts xAyF, measures it and saves the run in ``out``; creates the model if it is missing.

    layout: x and y.
    """
    if not (model / "config.json").exists():
        make_model("qwen3_moe", model, resolve("qwen3_moe", "bench"))
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    x, y = layout
    config = {
        "model": str(model.absolute()),
        "attention": {
            "instances": x,
            "max_model_len": 512,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_BATCHED,
            "kv_cache_gib": 0.3,
            "dtype": "bfloat16",
        },
        "ffn": {"instances": y},
        "pipeline": {"depth": DEPTH, "min_rows": 1},
    }
    about: dict[str, str | int] = {
        "model": model.name,
        "attention": x,
        "ffn": y,
        "depth": DEPTH,
        "layers": int(settings["num_hidden_layers"]),
        "hidden": int(settings["hidden_size"]),
        "machine": machine(),
        "command": command,
        "date": today(),
    }
    out.mkdir(parents=True, exist_ok=True)
    print(f"starting {x}A{y}F", flush=True)
    with disaggregated(config) as server:
        server.set_depth(DEPTH)
        send(server.url, server.model, poisson(8.0, 2.0, PROMPT, OUTPUT, seed=99))  # warm up
        for number in range(turns):
            save_turn(out, number, _turn(server, x, rates, number), about)
            text = json.dumps({**about, "turns": number + 1}, indent=1)
            (out / RUN).write_text(text + "\n", encoding="utf-8")  # complete after every turn


def _turn(server: Server, x: int, rates: Sequence[float], number: int) -> Turn:
    observed = {}
    for active in range(1, x + 1):
        plan = Plan(
            batches=_BATCHES,
            contexts=(PROMPT[1],),
            prefill=_PROMPTS,
            rounds=_ROUNDS,
            window_s=_WINDOW_S,
            depth=DEPTH,
            longest=511,
            instances=active,
            stream=True,
        )
        with server.active(active, x):
            observed[active] = observe(server, plan)
    sent, traced, inside = {}, {}, {}
    for rate in rates:
        begin, before = time.monotonic_ns(), engine_s(server.metrics())
        planned = poisson(rate, SECONDS, PROMPT, OUTPUT, seed=1000 * number + round(rate))
        sent[rate] = send(server.url, server.model, planned)
        pages, end = server.trace(), time.monotonic_ns()
        traced[rate] = {n: times_of(pages, begin, end, active=n) for n in range(1, x + 1)}
        time.sleep(_WINDOW_S)  # vLLM counts a request after its last token has left
        inside[rate] = (engine_s(server.metrics()) - before) / len(planned)
        found = measured(sent[rate], inside[rate])
        print(f"turn {number}, {rate:g} requests/s: {found}", flush=True)
    return Turn(observed, sent, traced, inside)


def engine_s(exposition: str) -> float:
    """Returns the seconds that all requests took from the engine's queue to their first token."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name in _INSIDE
    )


def save_turn(folder: Path, number: int, turn: Turn, about: dict[str, str | int]) -> None:
    command = f"{about['command']} (turn {number})"
    instances = int(about["attention"])
    for active, observed in turn.observed.items():
        path = folder / stages_name(number, active, instances)
        write(path, points([observed]), str(about["model"]), command)
    for rate, sent in turn.sent.items():
        path = folder / f"sent-{number}-{rate:g}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Sent)], lineterminator="\n")
            writer.writeheader()
            for one in sent:
                writer.writerow({k: round(v, 5) for k, v in asdict(one).items()})
    loads = {
        f"{rate:g}": {
            "inside_s": round(turn.inside[rate], 5),
            "active": {active: summary(times) for active, times in by_active.items()},
            "spread": {
                stage: _spread([vars(times)[stage] for times in by_active.values()])
                for stage in ("attention", "ffn")
            },
        }
        for rate, by_active in turn.traced.items()
    }
    text = json.dumps(loads).replace('], "', '],\n"')
    (folder / f"traced-{number}.json").write_text(text + "\n", encoding="utf-8")


def stages_name(number: int, active: int, instances: int) -> str:
    """Returns the name of a turn's stage times with ``active`` of the attention instances."""
    return f"stages-{number}" + (f"-active{active}" if active < instances else "") + ".json"


def summary(times: Times) -> dict[str, Any]:
    """Returns, per stage, [rows, number, mean, mean without long pauses] in microseconds."""
    stages = {"attention": times.attention, "ffn": times.ffn, "rest": times.rest}
    return {
        name: [
            [rows, len(us), round(statistics.mean(us), 1), round(_usual(us), 1)]
            for rows, us in sorted(some.items())
        ]
        for name, some in stages.items()
    }


def _usual(us: Sequence[float]) -> float:
    most = _PAUSE * statistics.median(us)
    return statistics.mean(time_us for time_us in us if time_us <= most)


def _spread(every: Sequence[Samples]) -> list[float]:
    """Returns how a stage's time varies from call to call: time over its mean at the same rows, in
    each of ``every``.

    The values are the means of equally many neighbours, so the longest times count as they should.
    A micro-batch waits for the slowest of all roles, and with four of them, what is rare decides.
    """
    ratios = sorted(
        value / statistics.mean(us)
        for samples in every
        for us in samples.values()
        for value in us
        if len(us) >= _LEAST and value > 0
    )
    groups = min(_GROUPS, len(ratios))
    cuts = [len(ratios) * index // max(groups, 1) for index in range(groups + 1)]
    return [round(statistics.mean(ratios[a:b]), 4) for a, b in pairwise(cuts)] or [1.0]


def measured(sent: Sequence[Sent], inside_s: float) -> dict[str, float]:
    """Returns the metrics of a load: seconds, and output tokens/s until the last token.

    inside_s: mean seconds from the engine's queue to the first token.
    """
    last = max(one.arrival_s + one.e2el_s for one in sent)
    return {
        "engine_ttft_mean": inside_s,
        "ttft_p50": statistics.median(one.ttft_s for one in sent),
        "tpot_p50": statistics.median(one.tpot_s for one in sent),
        "e2el_p50": statistics.median(one.e2el_s for one in sent),
        "tokens_per_s": sum(one.output for one in sent) / last,
    }
