"""Pipeline efficiency: busy time of the busiest role / step time, at each depth.

Both sides record on the device when the work on each micro-batch begins and ends
(metrics.stage_every). The benchmark holds a steady decode load and reads these stage timestamps of
the last steps from all roles. A second deployment without stage timestamps runs the same load, to
measure their cost. Per cell a trace of one step, with both sides on one clock, is written for
ui.perfetto.dev.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from afd.errors import AfdError, ConfigError
from afd_bench.gpu.common import (
    Budget,
    Report,
    add_model,
    add_routing,
    case_of,
    count,
    model_of,
    parser,
    report,
    routed_case,
    routing_variables,
)
from afd_bench.gpu.kv import kv_gib
from afd_bench.gpu.load import Load, answered, device_step_s, held, read
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.slices import Slice
from afd_bench.gpu.targets import Afd, Sizes, Target, parse, vllm_args
from afd_bench.gpu.timeline import Step, Summary, chrome, fetch, join, summary
from afd_bench.servers import Server
from afd_planner.facts.model_hf import load_model

AIM = 0.97
_WAIT_S = 1.0
_ATTENTION = "attention-0"


@dataclass(frozen=True)
class Cell:
    """One measurement.

    found: means over the steps. one: the last step. device_s: mean time of a step on the device,
    (with stage timestamps, without); 0 if no step was replayed as a graph. answered: tokens of a
    request's answer meanwhile.
    """

    target: Afd
    depth: int
    load: Load
    found: Summary
    one: Step
    device_s: tuple[float, float]
    answered: float


@dataclass(frozen=True)
class Model:
    """A model slice, its checkpoint, and the limits of its servers."""

    name: str
    model_slice: Slice
    path: Path
    sizes: Sizes


def main(argv: Sequence[str]) -> int:
    options = parser("efficiency", __doc__, 240.0)
    add_model(options, "qwen3-30b", several=True)
    add_routing(options)
    options.add_argument(
        "--targets", nargs="+", default=["1A1F"], metavar="NAME", help="topologies"
    )
    options.add_argument("--wire", default="exact", choices=("exact", "fp8"), help="wire format")
    options.add_argument(
        "--depths", type=int, nargs="+", default=[3, 2, 1], choices=(1, 2, 3),
        help="micro-batches in flight",
    )  # fmt: skip
    options.add_argument(
        "--batches", type=count, nargs="+", default=[64, 256], help="requests at a time"
    )
    options.add_argument(
        "--contexts", type=count, nargs="+", default=[1024], help="tokens of a prompt"
    )
    options.add_argument("--answer", type=count, default=2_000, help="most tokens of an answer")
    options.add_argument(
        "--marked-only", action="store_true",
        help="start no second deployment without stage timestamps",
    )  # fmt: skip
    options.add_argument(
        "--traces", type=Path, default=Path("logs/gpu/traces"), help="folder of the traces"
    )
    args = options.parse_args(argv)
    budget = Budget(args.seconds)
    timestamped = [_afd(name, args.wire) for name in args.targets]
    plain = [] if args.marked_only else [replace(target, stage_every=0) for target in timestamped]
    models = [_model(args, name, timestamped) for name in args.model]
    out = report("gpu", args, "efficiency", argv)
    measured = 0
    with _all_running(models, [*timestamped, *plain], args) as started:
        for model, servers in started:
            for cell in _cells(model, servers, args, budget):
                measured += 1
                _print(model, cell)
                _record(cell, case_of(model.name, model.model_slice) + routed_case(args), out)
                _write_trace(model, cell, args)
    return 0 if measured else 1


def _model(args: argparse.Namespace, name: str, targets: Sequence[Afd]) -> Model:
    requests, length = max(args.batches), max(args.contexts) + args.answer
    model_slice, path = model_of(args, name, length)
    cache = kv_gib(targets, requests, length, load_model(str(path)))
    return Model(name, model_slice, path, Sizes(requests, length, cache, tuple(args.batches)))


@contextlib.contextmanager
def _all_running(
    models: Sequence[Model], targets: Sequence[Afd], args: argparse.Namespace
) -> Iterator[list[tuple[Model, Mapping[Target, Server]]]]:
    """Starts every target of every model at once; yields the models for which a server started.

    Raises:
        AfdError: no server started.
    """
    flags = [*vllm_args(args.device, True), *args.vllm_args]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(models)) as pool:

        def start(model: Model) -> Mapping[Target, Server]:
            logs, path, sizes = args.logs / model.name, model.path, model.sizes
            try:
                return stack.enter_context(
                    running(
                        targets,
                        Setup(path, sizes, args.device, flags, logs, routing_variables(args)),
                    )
                )
            except AfdError as err:
                print(f"{model.name}: FAILED: {err}", flush=True)
                return {}

        started = zip(models, pool.map(start, models), strict=True)
        found = [(model, servers) for model, servers in started if servers]
        if not found:
            raise AfdError("no server started; see the errors above")
        yield found


def _afd(name: str, wire: str) -> Afd:
    target: Target = parse(name, wire)
    if not isinstance(target, Afd):
        raise ConfigError(f"{name} has no pipeline; use topologies such as 1A1F")
    return replace(target, stage_every=1)


def _cells(
    model: Model, servers: Mapping[Target, Server], args: argparse.Namespace, budget: Budget
) -> Iterator[Cell]:
    timestamped = [target for target in servers if isinstance(target, Afd) and target.stage_every]
    cells = product(timestamped, args.contexts, args.batches, args.depths)
    for target, context, batch, depth in cells:
        what = f"{model.name} {target.label} batch {batch} context {context} depth {depth}"
        if not budget.allows(what, 5.0):
            return
        load = Load(batch, context, model.sizes.length, model.model_slice.sizes.vocab, args.seed)
        plain = servers.get(replace(target, stage_every=0))
        try:
            steps, answer, device_s = asyncio.run(_watch(servers[target], load, depth))
            without = asyncio.run(_watch(plain, load, depth))[2] if plain else 0.0
            if not steps:
                raise AfdError(
                    "no recorded step at this depth includes all roles; see the servers' logs"
                )
        except AfdError as err:
            print(f"{what}: FAILED: {err}", flush=True)
            continue
        yield Cell(target, depth, load, summary(steps), steps[-1], (device_s, without), answer)


async def _watch(server: Server, load: Load, depth: int) -> tuple[list[Step], float, float]:
    """Returns the last steps of a second of decode, the mean tokens of an answer meanwhile, and the
    mean device time of a step in s."""
    server.set_depth(depth)
    async with held(server, load) as before:
        first = await read(server, depth)
        await asyncio.sleep(_WAIT_S)
        kept = await asyncio.to_thread(fetch, server)
        last = await read(server, depth)
    answer = answered(before, first, last, load.requests)
    return join(kept, _ATTENTION, depth), answer, device_step_s(first, last)


def _print(model: Model, cell: Cell) -> None:
    f = cell.found
    busy = ", ".join(f"{member} {share:.3f}" for member, share in f.busy.items())
    error = max(cell.one.errors_ns.values()) / 1e3
    print(
        f"{model.name} {cell.target.label} depth {cell.depth} batch {cell.load.requests} context"
        f" {cell.load.prompt}: efficiency"
        f" {f.efficiency:.3f} ({busy}), in the layers {f.in_layers:.3f}, step"
        f" {f.step_s * 1e3:.3f} ms; attention {f.attention_us:.1f} us, to FFN {f.to_ffn_us:.1f},"
        f" FFN {f.ffn_us:.1f}, back {f.to_attention_us:.1f}; {f.steps} steps, clocks within"
        f" {error:.1f} us",
        flush=True,
    )
    timestamped, plain = cell.device_s
    if timestamped and plain:
        print(
            f"  step on the device {timestamped * 1e3:.3f} ms with stage timestamps,"
            f" {plain * 1e3:.3f} without: {timestamped / plain:.3f}x",
            flush=True,
        )


def _record(cell: Cell, model: str, out: Report) -> None:
    load = cell.load
    case = f"{model} {cell.target.label} depth {cell.depth} batch {load.requests}"
    case += f" context {load.prompt}"
    f = cell.found
    out.add_tokens(case, load.prompt + cell.answered, load.prompt)
    out.add(case, "efficiency", f.efficiency, "fraction of the step", "aim", AIM)
    out.add(case, "efficiency_in_layers", f.in_layers, "fraction of its layers", "aim", AIM)
    for metric, value in (
        ("attention_us", f.attention_us),
        ("to_ffn_us", f.to_ffn_us),
        ("ffn_us", f.ffn_us),
        ("to_attention_us", f.to_attention_us),
    ):
        share = 1e6 * f.step_s / len(cell.one.attention.spans)
        out.add(case, metric, value, "us", "step per position", share, more_is_better=False)
    timestamped, plain = cell.device_s
    if timestamped and plain:
        # Metric and peer are keys of published records; "marked" means with stage timestamps.
        out.add(
            case, "step_ms_marked", 1e3 * timestamped, "ms", "no marks", 1e3 * plain,
            more_is_better=False,
        )  # fmt: skip


def _write_trace(model: Model, cell: Cell, args: argparse.Namespace) -> None:
    args.traces.mkdir(parents=True, exist_ok=True)
    load, label = cell.load, cell.target.label.replace(" ", "-")
    name = f"{model.name}-{label}-c{load.prompt}-b{load.requests}-d{cell.depth}.json"
    file = args.traces / name
    file.write_text(json.dumps(chrome(cell.one, _ATTENTION)), encoding="utf-8")
    print(f"  {file} written at {time.strftime('%H:%M:%S')}", flush=True)
