"""`afd bench stages CONFIG`: measures a deployment's stage times and writes them for the planner.

Starts the deployment. For every context length and batch size it keeps that many requests in decode
for --window seconds. Then it sends prompts with one output token each. Every point is a mean over
steps with decode rows only, or with prompt rows only. The transport timestamps each message, and
afd_bench/message_times.py derives the stage times from these timestamps. `afd plan --measured` and
`afd simulate` read the written file (format: afd_planner/cost/measured.py).

The times belong to one depth (--depth) and depend on it: a side that waits between its stages runs
them more slowly than a side that is never idle.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from afd.config.deployment import load_config
from afd.errors import AfdError, DeadlineExceeded
from afd.records import machine, today
from afd_bench.message_times import Samples, Times, times_of
from afd_bench.servers import Server, disaggregated
from afd_bench.stage_points import Decode, Observed, points
from afd_bench.workload import kept_running
from afd_planner.cost.measured import FORMAT, parse_measured

_VOCAB = 2000
_POLL_S = 0.2
_CELL_S = 120.0
_PROPAGATION_S = 0.5  # until the instances have received a new depth


@dataclass(frozen=True)
class Totals:
    """Counters of a deployment at one moment, summed over all roles.

    moment_ns: CLOCK_MONOTONIC. running, generated: vLLM's running requests and generated tokens.
    replayed, replayed_s: steps replayed as graphs, and their time on the device in seconds.
    """

    moment_ns: int
    running: float
    generated: float
    replayed: float = 0.0
    replayed_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What to measure.

    batches: requests per attention instance. contexts: prompt tokens. prefill: prompt rows per
    attention instance; each is repeated ``rounds`` times, in prompts of ``prompt`` tokens (0: one
    prompt).
    window_s: seconds per decode point. longest: most tokens of a request, prompt plus output.
    instances: attention instances that get requests. stream: requests stream their answers, which
    costs the gateway and vLLM's server time of the same cores.
    """

    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 11, 16, 32)
    contexts: tuple[int, ...] = (32,)
    prefill: tuple[int, ...] = (64, 256, 1024)
    prompt: int = 0
    rounds: int = 5
    window_s: float = 3.0
    depth: int = 1
    longest: int = 1024
    instances: int = 1
    stream: bool = False


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    deployment = load_config(args.config, [])
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    config["model"] = str(deployment.model)
    plan = Plan(
        tuple(args.batches),
        tuple(args.contexts),
        tuple(args.prefill),
        args.prompt,
        args.rounds,
        args.window,
        args.depth,
        deployment.attention.max_model_len - 1,
        min(args.active or deployment.attention.instances, deployment.attention.instances),
    )
    instances = deployment.attention.instances
    print(f"starting {instances}A{deployment.ffn.instances}F", flush=True)
    with disaggregated(config) as server, server.active(plan.instances, instances):
        measured = measure(server, plan)
    command = "afd bench stages " + " ".join(argv)
    write(args.out, measured, deployment.model.name, command)
    return 0


def write(path: Path, measured: Mapping[str, object], model: str, command: str) -> None:
    """Writes the points of :func:`measure` to a file and prints notes on suspicious ones."""
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
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=Plan.batches,
        help="decode requests per attention instance",
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=Plan.contexts, help="prompt tokens"
    )
    parser.add_argument(
        "--prefill",
        type=int,
        nargs="*",
        default=Plan.prefill,
        help="prompt rows per prefill measurement",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=Plan.prompt,
        help="tokens per prompt of a prefill (0: all rows in one prompt)",
    )
    parser.add_argument(
        "--rounds", type=int, default=Plan.rounds, help="repetitions per prefill size"
    )
    parser.add_argument(
        "--window", type=float, default=Plan.window_s, help="seconds per decode point"
    )
    parser.add_argument(
        "--depth", type=int, default=1, choices=(1, 2, 3), help="micro-batches in flight"
    )
    parser.add_argument(
        "--active",
        type=int,
        default=0,
        metavar="N",
        help="attention instances that get requests (0: all); for times.fewer of a simulation",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file of measured stage times"
    )
    return parser.parse_args(argv)


def measure(server: Server, plan: Plan) -> dict[str, list[dict[str, float]]]:
    """Returns the points of every stage, in the format of a measured-times file."""
    return points([observe(server, plan)])


def observe(server: Server, plan: Plan) -> Observed:
    """Measures every point of a plan."""
    server.set_depth(plan.depth)
    time.sleep(_PROPAGATION_S)
    decodes: list[list[Decode]] = []
    for context in plan.contexts:
        decodes.append([])
        for batch in plan.batches:
            decode = asyncio.run(_decode(server, batch, context, plan))
            decodes[-1].append(decode)
            print(_line(f"batch {batch}, context {decode.context:.0f}", decode.times), flush=True)
    prefills = []
    for rows in plan.prefill:
        times = asyncio.run(_prefill(server, rows, plan))
        prefills.append(times)
        print(_line(f"{rows} prompt rows", times), flush=True)
    return Observed(decodes, prefills)


async def _decode(server: Server, batch: int, context: int, plan: Plan) -> Decode:
    """Keeps ``batch`` requests per attention instance in decode and measures one window."""
    count = batch * plan.instances
    async with _load(server, count, context, plan):
        idle = await _read(server)
        while True:  # until every prompt is in the KV cache and every request decodes
            first = await _read(server)
            begun = first.generated - idle.generated
            if first.running == count and begun >= 3 * count:
                break
            if first.moment_ns > idle.moment_ns + _CELL_S * 1e9:
                raise DeadlineExceeded(
                    f"{count} requests were not running after {_CELL_S:g} s; raise"
                    " attention.max_num_seqs or lower --batches"
                )
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(plan.window_s)
        last = await _read(server)
        traced = await asyncio.to_thread(server.trace)
        if last.running != count:
            raise AfdError(
                f"requests ended inside the window of {plan.window_s:g} s; raise"
                " attention.max_model_len, or lower --window or --contexts"
            )
    await _quiet(server)
    grown = ((first.generated + last.generated) / 2 - idle.generated) / count
    times = times_of(traced, first.moment_ns, last.moment_ns, batch, plan.instances)
    if not times.ffn:
        raise AfdError(f"no step of {batch} requests ran inside the window; raise --window")
    return Decode(context + grown, times)


async def _prefill(server: Server, rows: int, plan: Plan) -> Times:
    """Sends ``rows`` prompt tokens to every instance at once, ``rounds`` times; one output token
    per prompt.

    With several instances, each decodes a request meanwhile: prompts that arrive at idle instances
    would run in steps of their own, one instance after the other.
    """
    each = min(plan.prompt or rows, rows, plan.longest)
    beside = plan.instances if plan.instances > 1 else 0
    async with _load(server, beside, min(plan.contexts), plan):
        while (first := await _read(server)).running < beside:
            await asyncio.sleep(_POLL_S)
        async with aiohttp.ClientSession() as session:
            for _ in range(plan.rounds):
                every = [
                    [_prompt(each) for _ in range(rows // each)] for _ in range(plan.instances)
                ]
                await asyncio.gather(
                    *(_complete(session, server, some, 1, stream=plan.stream) for some in every)
                )
        last = await _read(server)
        traced = await asyncio.to_thread(server.trace)
    times = times_of(traced, first.moment_ns, last.moment_ns, active=plan.instances)
    for rows_of_decode in range(1, beside + 1):
        times.attention.pop(rows_of_decode, None)
        times.ffn.pop(rows_of_decode, None)
    await _quiet(server)
    if not times.ffn:
        raise AfdError(f"no step of {rows} prompt tokens was traced; raise --rounds")
    return times


@contextlib.asynccontextmanager
async def _load(server: Server, count: int, context: int, plan: Plan) -> AsyncIterator[None]:
    """Runs ``count`` requests of the longest output inside the block; cancels them after."""
    tokens = plan.longest - context
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(
                _complete(session, server, [_prompt(context)], tokens, stream=plan.stream)
            )
            for _ in range(count)
        ]
        async with kept_running(tasks):
            yield


def _prompt(length: int) -> list[int]:
    # Like no other, or the gateway would send it where that one went, and vLLM find it cached.
    return [5 + random.randrange(_VOCAB) for _ in range(length)]


async def _complete(
    session: aiohttp.ClientSession,
    server: Server,
    prompts: list[list[int]],
    tokens: int,
    *,
    stream: bool,
) -> None:
    body = {
        "model": server.model,
        "prompt": prompts,
        "stream": stream,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": tokens,
    }
    async with session.post(f"{server.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            text = await answer.text()
            raise AfdError(f"{server.url} returned {answer.status}: {text}; see its log")
        await answer.read()


async def _quiet(server: Server) -> None:
    """Waits until no request runs: cancelled requests stay in the batch for a step or two."""
    end = time.monotonic() + _CELL_S
    while (await _read(server)).running:
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"cancelled requests still run after {_CELL_S:g} s; see the server's log"
            )
        await asyncio.sleep(_POLL_S)


async def _read(server: Server) -> Totals:
    exposition = await asyncio.to_thread(server.metrics)
    return totals(exposition, time.monotonic_ns())


def totals(exposition: str, moment_ns: int, depth: int | None = None) -> Totals:
    """Reads the counters in a gateway's Prometheus exposition, summed over instances.

    depth: counts replayed steps of this depth only; None counts all.
    """
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if depth is None or sample.labels.get("depth", str(depth)) == str(depth):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return Totals(
        moment_ns,
        sums.get("vllm:num_requests_running", 0.0),
        sums.get("vllm:generation_tokens_total", 0.0),
        sums.get("afd_graph_steps_total", 0.0),
        sums.get("afd_graph_step_seconds_total", 0.0),
    )


def _line(what: str, times: Times) -> str:
    """Returns a progress line with the means over all messages of a window."""

    def mean(samples: Samples) -> str:
        values = [value for some in samples.values() for value in some]
        return f"{statistics.mean(values):.0f}" if values else "-"

    return (
        f"{what}: attention {mean(times.attention)} us, ffn {mean(times.ffn)} us,"
        f" wire {mean(times.wire)} us, rest of a step {mean(times.rest)} us"
    )
