"""Decode steps of a served 1A1F with and without the fused attention kernels (attention.fused).

Both deployments run at the same time on the same GPUs, and are measured in turns, so that clocks
affect them equally. Both record stage timestamps (metrics.stage_every). Experts are random and in
FP8, attention weights are in bfloat16, and the wire is FP8. The value is the median of the rounds.

Use two GPUs. With one, both roles share it in time slices, which are in every stage time.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from afd.errors import AfdError
from afd_bench.gpu.common import (
    Budget,
    Report,
    add_model,
    case_of,
    count,
    model_of,
    parser,
    report,
    usable_gpus,
)
from afd_bench.gpu.kv import kv_gib
from afd_bench.gpu.load import Load, device_step_s, held, read
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.targets import Afd, Sizes, Target, fitted, vllm_args
from afd_bench.gpu.timeline import fetch, join
from afd_bench.servers import Server
from afd_planner.facts.model_hf import load_model

PEER = "without"
_PROPAGATION_S = 0.3  # until the instances have received a new depth
_CELL_S = 4.0  # estimated time of one measurement


@dataclass(frozen=True)
class Times:
    """Medians of one cell. step_us: of a step on the device. attention_us: of the attention stage
    of one micro-batch in one layer."""

    step_us: float
    attention_us: float


def main(argv: Sequence[str]) -> int:
    options = parser("fused_served", __doc__, 240.0)
    add_model(options, "qwen3-30b-short", several=True)
    options.add_argument(
        "--batches", type=count, nargs="+", default=[64, 256], help="requests at a time"
    )
    options.add_argument("--context", type=count, default=1024, help="tokens of a prompt")
    options.add_argument(
        "--depths", type=int, nargs="+", default=[1, 3], choices=(1, 2, 3),
        help="micro-batches in flight",
    )  # fmt: skip
    options.add_argument("--rounds", type=count, default=3, help="measurements of each deployment")
    options.add_argument("--window", type=float, default=1.0, help="seconds per measurement")
    options.add_argument("--answer", type=count, default=2_000, help="most tokens of an answer")
    options.add_argument(
        "--kv", default="bfloat16", choices=("bfloat16", "fp8"), help="dtype of every KV cache"
    )
    args = options.parse_args(argv)
    budget, measured = Budget(args.seconds), 0
    out = report("fused", args, "fused_served", argv)
    for name in args.model:
        if budget.allows(name):
            measured += _of_model(name, args, budget, out)
    return 0 if measured else 1


def targets(device: str, gpus: int) -> tuple[Afd, Afd]:
    """Returns the deployments with and without the kernels; on CPU both run without."""
    on_gpu = device != "cpu"
    without = Afd(
        1, 1, "fp8", stage_every=1, dummy=True, fused=False,
        weights="fp8_block" if on_gpu else "auto",
    )  # fmt: skip
    without = fitted(without, gpus if on_gpu else 0)
    return replace(without, fused=True if on_gpu else "auto"), without


def _of_model(name: str, args: argparse.Namespace, budget: Budget, out: Report) -> int:
    """Measures one model; returns the number of cells."""
    length = args.context + args.answer
    model_slice, path = model_of(args, name, length, experts=False)
    both = targets(args.device, usable_gpus())
    batches = max(args.batches)
    cache = kv_gib(both, batches, length, load_model(str(path)))
    sizes = Sizes(batches, length, cache, tuple(args.batches))
    flags = [*vllm_args(args.device, True, args.kv), *args.vllm_args]
    model = case_of(name, model_slice) + ("" if args.kv == "bfloat16" else f" {args.kv} cache")
    found = 0
    with running(both, Setup(path, sizes, args.device, flags, args.logs / name)) as servers:
        if len(servers) < len(both):
            print(f"{name}: FAILED: a deployment did not start; see the error above", flush=True)
            return 0
        loads = [
            Load(batch, args.context, length, model_slice.sizes.vocab, args.seed)
            for batch in args.batches
        ]
        for load, depth in product(loads, args.depths):
            case = f"{model} 1A1F fp8 wire depth {depth} batch {load.requests}"
            case += f" context {load.prompt}"
            if not budget.allows(case, _CELL_S * 2 * args.rounds):
                break
            try:
                ours, theirs = _in_turns(both, servers, load, depth, args)
            except AfdError as err:
                print(f"{case}: FAILED: {err}", flush=True)
                continue
            found += 1
            _report(case, ours, theirs, out)
    return found


def _in_turns(
    both: Sequence[Afd],
    servers: Mapping[Target, Server],
    load: Load,
    depth: int,
    args: argparse.Namespace,
) -> Iterator[Times]:
    """Returns the times of each deployment, in the order of ``both``. Raises AfdError."""
    for target in both:
        servers[target].set_depth(depth)
    time.sleep(_PROPAGATION_S)
    rounds: dict[Target, list[Times]] = {target: [] for target in both}
    for number in range(args.rounds):
        for target in both if number % 2 else tuple(reversed(both)):
            found = asyncio.run(_measured(servers[target], load, depth, args.window))
            rounds[target].append(found)
    return (
        Times(
            statistics.median(times.step_us for times in rounds[target]),
            statistics.median(times.attention_us for times in rounds[target]),
        )
        for target in both
    )


async def _measured(server: Server, load: Load, depth: int, window_s: float) -> Times:
    async with held(server, load):
        before = await read(server, depth)
        await asyncio.sleep(window_s)
        kept = await asyncio.to_thread(fetch, server)
        after = await read(server, depth)
    steps = [step.attention for step in join(kept, "attention-0", depth)]
    worked = [ns for step in steps for ns in step.worked_ns]
    if not worked:
        raise AfdError(f"no step at depth {depth} was recorded; see {server.log}")
    step_s = device_step_s(before, after)
    if not step_s:  # eager steps: the time from the first to the last work
        step_s = statistics.median(step.ended_ns - step.began_ns for step in steps) / 1e9
    return Times(1e6 * step_s, statistics.median(worked) / 1e3)


def _report(case: str, ours: Times, theirs: Times, out: Report) -> None:
    for metric, mine, other in (
        ("step_us", ours.step_us, theirs.step_us),
        ("attention_stage_us", ours.attention_us, theirs.attention_us),
    ):
        print(
            f"{case}: {metric} {mine:.1f} with, {other:.1f} without ({other / mine:.3f}x)",
            flush=True,
        )
        out.add(case, metric, mine, "us", PEER, other, more_is_better=False)
