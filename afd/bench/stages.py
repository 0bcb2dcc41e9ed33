"""`afd bench stages CONFIG`: stage times of a running deployment, as a table for the planner.

Starts the deployment, then for every context length and batch size holds that many requests in
decode and reads the counters of all roles at the two ends of a window, so that each point is a mean
over steady decode steps and contains no prefill. Prompts of one token more than a power of two or
so are then sent one by one for the time of a prefill step. The file that it writes is read by
`afd plan --measured` and `afd simulate` (format: afd/planner/cost/measured.py).

Runs at depth 1 unless told otherwise: stage times go by the rows of a micro-batch, and at depth 1
the two sides do not run at the same time. Throughput at other depths is then a prediction.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from afd.bench.records import machine, today
from afd.bench.scrape import StageTimes, stage_times
from afd.bench.servers import Server, disaggregated
from afd.config import load_config
from afd.errors import AfdError, DeadlineExceeded
from afd.planner.cost.measured import FORMAT, parse_measured

_VOCAB = 2000
_POLL_S = 0.2
_CELL_S = 120.0
_SETTLE_S = 0.5  # a depth reaches the instances with the next message of the control plane


@dataclass(frozen=True)
class Totals:
    """Counters of a whole deployment at one moment.

    moment_s: monotonic. steps: of attention instances. wire_bytes: by direction. running, prompt,
    generated: vLLM's running requests, prompt tokens and generated tokens.
    """

    moment_s: float
    stages: StageTimes
    steps: float
    wire_bytes: dict[str, float]
    running: float
    prompt: float
    generated: float


@dataclass(frozen=True)
class Window:
    """What happened between two moments. Times in microseconds, each a mean.

    rows: per micro-batch and attention instance. context: tokens in the KV cache per request at the
    window's middle. instances: of attention. period_us: of one step. in_step_us: of its layers.
    """

    rows: float
    context: float
    instances: int
    attention_us: float
    ffn_us: float
    wire_us: float
    wire_bytes: float
    period_us: float
    in_step_us: float


@dataclass(frozen=True)
class Plan:
    """What to measure. batches: requests per attention instance. contexts: prompt tokens. prefill:
    prompt sizes, each sent ``rounds`` times. window_s: per decode point. longest: tokens of a
    request, prompt and answer together. instances: of attention."""

    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 11, 16, 32)
    contexts: tuple[int, ...] = (32,)
    prefill: tuple[int, ...] = (64, 256, 1024)
    rounds: int = 5
    window_s: float = 3.0
    depth: int = 1
    longest: int = 1024
    instances: int = 1


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    deployment = load_config(args.config, [])
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    config["model"] = str(deployment.model)
    plan = Plan(
        tuple(args.batches),
        tuple(args.contexts),
        tuple(args.prefill),
        args.rounds,
        args.window,
        args.depth,
        deployment.attention.max_model_len - 1,
        deployment.attention.instances,
    )
    print(f"starting {plan.instances}A{deployment.ffn.instances}F", flush=True)
    with disaggregated(config) as server:
        measured = measure(server, plan)
    command = "afd bench stages " + " ".join(argv)
    write(args.out, measured, deployment.model.name, command)
    return 0


def write(path: Path, measured: Mapping[str, object], model: str, command: str) -> None:
    """Write the points of :func:`measure` as a file, and print what is odd about them."""
    about = {"machine": machine(), "model": model, "command": command, "date": today()}
    text = json.dumps({"format": FORMAT, **about, **measured}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    for note in parse_measured(json.loads(text), str(path)).notes:
        print(f"note: {note}")
    print(f"{path} written")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench stages", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a deployment file")
    parser.add_argument("--batches", type=int, nargs="+", default=Plan.batches)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=Plan.contexts, help="prompt tokens"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=Plan.prefill)
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="prompts per prefill size")
    parser.add_argument(
        "--window", type=float, default=Plan.window_s, help="seconds per decode point"
    )
    parser.add_argument("--depth", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser.parse_args(argv)


def measure(server: Server, plan: Plan) -> dict[str, list[dict[str, float]]]:
    """The points of every stage, as a file of measured times has them."""
    server.set_depth(plan.depth)
    time.sleep(_SETTLE_S)
    windows: list[list[Window]] = []
    for context in plan.contexts:
        windows.append([])
        for batch in plan.batches:
            windows[-1].append(asyncio.run(_decode(server, batch, context, plan)))
            print(_line(batch, windows[-1][-1]), flush=True)
    prefills = []
    for rows in plan.prefill:
        prefills.append(asyncio.run(_prefill(server, min(rows, plan.longest), plan.rounds)))
        print(_line(1, prefills[-1]), flush=True)
    return points(windows, prefills, plan.depth)


async def _decode(server: Server, batch: int, context: int, plan: Plan) -> Window:
    """Hold ``batch`` requests per attention instance in decode and look at one window of it."""
    count = batch * plan.instances
    async with _load(server, count, context, plan.longest - context):
        idle = await _read(server)
        while True:  # until every prompt is in the KV cache and decode is under way
            first = await _read(server)
            begun = first.generated - idle.generated
            if first.running == count and begun >= 3 * count:
                break
            if first.moment_s > idle.moment_s + _CELL_S:
                raise DeadlineExceeded(
                    f"{count} requests were not running after {_CELL_S:g} s; raise"
                    " attention.max_num_seqs or lower --batches"
                )
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(plan.window_s)
        last = await _read(server)
        if last.running != count:
            raise AfdError(
                f"requests ended inside the window of {plan.window_s:g} s; raise"
                " attention.max_model_len, or lower --window or --contexts"
            )
    await _quiet(server)
    grown = ((first.generated + last.generated) / 2 - idle.generated) / count
    return window(first, last, batch / plan.depth, context + grown, plan.instances)


async def _prefill(server: Server, rows: int, rounds: int) -> Window:
    """Prompts of ``rows`` tokens, one at a time, one output token each: a step of prefill each."""
    await _quiet(server)
    first = await _read(server)
    async with aiohttp.ClientSession() as session:
        for turn in range(rounds):
            await _complete(session, server, turn, rows, 1)
    await _quiet(server)
    # one instance at a time works here, whichever it is
    return window(first, await _read(server), rows, rows / 2, 1)


@contextlib.asynccontextmanager
async def _load(server: Server, count: int, context: int, tokens: int) -> AsyncIterator[None]:
    """``count`` requests of ``tokens`` output tokens; ended from here when the window is over."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(_complete(session, server, index, context, tokens))
            for index in range(count)
        ]
        try:
            yield
            for task in tasks:
                if task.done():
                    await task  # shows why it ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _complete(
    session: aiohttp.ClientSession, server: Server, index: int, prompt: int, tokens: int
) -> None:
    salt = time.monotonic_ns()  # the prefix cache must not spare a prefill
    body = {
        "model": server.model,
        "prompt": [5 + (salt + index * 7919 + i * 31) % _VOCAB for i in range(prompt)],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": tokens,
    }
    async with session.post(f"{server.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise AfdError(f"{server.url} answered {answer.status}: {await answer.text()}")
        await answer.read()


async def _quiet(server: Server) -> None:
    """Wait until no request runs: aborted ones are still in the batch for a step or two."""
    end = time.monotonic() + _CELL_S
    while (await _read(server)).running:
        if time.monotonic() > end:
            raise DeadlineExceeded(f"aborted requests still run after {_CELL_S:g} s; see the log")
        await asyncio.sleep(_POLL_S)


async def _read(server: Server) -> Totals:
    exposition = await asyncio.to_thread(server.metrics)
    return totals(exposition, time.monotonic())


def totals(exposition: str, moment_s: float) -> Totals:
    """The counters in a gateway's exposition; those of several instances are added up."""
    sums: dict[str, float] = {}
    wire: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == "afd_wire_bytes_total":
                direction = sample.labels["direction"]
                wire[direction] = wire.get(direction, 0.0) + sample.value
            elif sample.name != "afd_steps_total" or sample.labels["instance"].startswith("att"):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return Totals(
        moment_s,
        stage_times(exposition),
        sums.get("afd_steps_total", 0.0),
        wire,
        sums.get("vllm:num_requests_running", 0.0),
        sums.get("vllm:prompt_tokens_total", 0.0),
        sums.get("vllm:generation_tokens_total", 0.0),
    )


def window(first: Totals, last: Totals, rows: float, context: float, instances: int) -> Window:
    """Means between two moments. Raises AfdError where no step ran in between."""
    steps = (last.steps - first.steps) / instances
    if steps < 1:
        raise AfdError("no step ran inside the window; raise --window or --rounds")
    stages = last.stages.since(first.stages)
    messages = stages.counts.get("a2f", 0.0) + stages.counts.get("f2a", 0.0)
    sent = sum(last.wire_bytes.values()) - sum(first.wire_bytes.values())
    wire_s = stages.seconds.get("a2f", 0.0) + stages.seconds.get("f2a", 0.0)
    in_step_s = stages.seconds.get("attention", 0.0) + stages.bubbles.get("attention", 0.0)
    return Window(
        rows=rows,
        context=context,
        instances=instances,
        attention_us=stages.mean_us("attention"),
        ffn_us=stages.mean_us("ffn"),
        wire_us=1e6 * wire_s / messages,
        wire_bytes=sent / messages,
        period_us=1e6 * (last.moment_s - first.moment_s) / steps,
        in_step_us=1e6 * in_step_s / instances / steps,
    )


def _line(batch: int, w: Window) -> str:
    return (
        f"batch {batch}, {w.rows:.1f} rows, context {w.context:.0f}: attention {w.attention_us:.0f}"
        f" us, ffn {w.ffn_us:.0f} us, wire {w.wire_us:.1f} us; step {w.period_us:.0f} us, of which"
        f" {w.period_us - w.in_step_us:.0f} us outside of the layers"
    )


def points(
    windows: Sequence[Sequence[Window]], prefills: Sequence[Window], depth: int
) -> dict[str, list[dict[str, float]]]:
    """windows: of decode, one sequence per context length."""
    decodes = [w for line in windows for w in line]
    both = [*decodes, *prefills]
    # Contexts drift by some tokens with the speed of each batch; a line of the table has one value.
    contexts = [round(sum(w.context for w in line) / len(line)) for line in windows]
    return {
        "attention": [
            {"rows": w.rows, "context": context, "us": round(w.attention_us, 1)}
            for context, line in zip(contexts, windows, strict=True)
            for w in line
        ],
        "prefill": [{"rows": w.rows, "us": round(w.attention_us, 1)} for w in prefills],
        "ffn": [{"rows": w.rows * w.instances, "us": round(w.ffn_us, 1)} for w in both],
        "wire": [{"bytes": round(w.wire_bytes), "us": round(w.wire_us, 2)} for w in both],
        "rest": [
            {"rows": w.rows * depth, "us": round(w.period_us - w.in_step_us, 1)} for w in decodes
        ],
    }
