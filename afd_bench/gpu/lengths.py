"""How much longer a served decode step takes if requests have different lengths.

One server holds the same number of requests in decode twice in turns: all equally long, and of half
to one and a half times that. The planner takes the second for granted (`afd_planner/data/kernels`,
mixed_attention), benchmarks mostly have the first. Prompts are filled instead of computed.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from afd.errors import AfdError
from afd_bench.gpu.common import (
    Budget,
    Report,
    add_kv,
    add_model,
    add_routing,
    cached_case,
    case_of,
    check_kv,
    count,
    model_of,
    parser,
    report,
    routed_case,
    routing_variables,
)
from afd_bench.gpu.kv import kv_gib
from afd_bench.gpu.load import Load, steady
from afd_bench.gpu.predict import predict
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.targets import Afd, Sizes, Target, in_modes, parse, vllm_args
from afd_bench.servers import Server
from afd_planner.cost.shape import calibrated
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.model_hf import load_model

PEER = "equal lengths"
_LONGEST = 1.5
"""Longest prompt over the mean."""
_CELL_S = 25.0  # estimated time of a cell, with its ramp-ups
_PROPAGATION_S = 0.3  # until the instances have received a new depth


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    budget, out = Budget(args.seconds), report("gpu", args, "lengths", argv)
    length = int(_LONGEST * max(context for _, context in args.cells)) + args.answer
    model_slice, path = model_of(args, args.model, length)
    model = load_model(str(path))
    (target,) = in_modes([parse(args.target)], [True], "graphs")
    cache = max(
        kv_gib([target], requests, context + args.answer, model, args.kv)
        for requests, context in args.cells
    )
    batches = tuple(sorted({requests for requests, _ in args.cells}))
    sizes = Sizes(max(batches), length, cache, batches)
    flags = [*vllm_args(args.device, True, args.kv), *args.vllm_args]
    setup = Setup(path, sizes, args.device, flags, args.logs, routing_variables(args))
    name = case_of(args.model, model_slice) + cached_case(args) + routed_case(args)
    measured = 0
    with running([target], setup) as servers:
        server = servers[target]
        label = target.label
        if isinstance(target, Afd):
            label += f" depth {args.depth}"
            server.set_depth(args.depth)
            time.sleep(_PROPAGATION_S)
        for requests, context in args.cells:
            what = f"{name} {label} batch {requests} context {context}"
            if not budget.allows(what, _CELL_S):
                break
            load = Load(requests, context, length, model_slice.sizes.vocab, args.seed)
            try:
                equal, mixed = step_times(server, load, args.rounds, args.window)
            except AfdError as err:
                print(f"{what}: FAILED: {err}", flush=True)
                continue
            measured += 1
            _tell(what, target, load, equal, mixed, model, args, out)
    return 0 if measured == len(args.cells) else 1


def step_times(server: Server, load: Load, rounds: int, window_s: float) -> tuple[float, float]:
    """Returns the median seconds of a step with equal and with mixed lengths. Raises AfdError."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for mixed, times in found.items():
            times.append(steady(server, replace(load, mixed=mixed), window_s).tpot_s)
    return statistics.median(found[False]), statistics.median(found[True])


def _tell(
    what: str,
    target: Target,
    load: Load,
    equal: float,
    mixed: float,
    model: ModelSpec,
    args: argparse.Namespace,
    out: Report,
) -> None:
    """Prints and records a cell, beside what the planner says of an H200."""
    gpu = load_accelerator("h200")
    said = [
        predict(
            target, args.depth, load.requests, load.prompt, model, gpu,
            replace(calibrated((gpu,)), equal_lengths=same), args.kv,
        ).tpot_s
        for same in (True, False)
    ]  # fmt: skip
    print(
        f"{what}: step {1e3 * equal:.2f} ms with equal lengths, {1e3 * mixed:.2f} with mixed ones,"
        f" {mixed / equal:.2f} times; predicted {1e3 * said[0]:.2f}, {1e3 * said[1]:.2f},"
        f" {said[1] / said[0]:.2f}",
        flush=True,
    )
    out.add(
        f"{what} mixed lengths", "step_ms", 1e3 * mixed, "ms", PEER, 1e3 * equal,
        more_is_better=False,
    )  # fmt: skip


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = parser("lengths", __doc__, 240.0)
    add_model(options, "qwen3-30b")
    add_routing(options)
    options.add_argument(
        "--target", default="TP1", help="TP1, TP2 or an xAyF; colocated vLLM with graphs only"
    )
    options.add_argument("--depth", type=int, default=1, choices=(1, 2, 3), help="of an xAyF")
    options.add_argument(
        "--cells", type=_requests_and_context, nargs="+", required=True,
        metavar="REQUESTSxCONTEXT",
        help="requests at a time and mean tokens of their prompts, such as 128x4096",
    )  # fmt: skip
    add_kv(options)
    options.add_argument("--answer", type=count, default=600, help="most tokens of a short answer")
    options.add_argument("--window", type=float, default=1.5, help="seconds per measurement")
    options.add_argument("--rounds", type=count, default=2, help="measurements of each kind")
    args = options.parse_args(argv)
    check_kv(args)
    return args


def _requests_and_context(text: str) -> tuple[int, int]:
    """Parses an argument REQUESTSxCONTEXT."""
    requests, _, context = text.partition("x")
    return count(requests), count(context)
