"""Prefill of a 1A1F and of colocated vLLM on the same GPUs: time to first token, prompt tokens/s.

Measures as `afd bench prefill` does on CPUs, and writes its records. The servers are measured in
turns; a server without requests does not use the GPUs. Two GPUs are one for each of our sides, and
tensor parallelism of colocated vLLM. On one GPU our sides share it in time slices, so attention and
experts do not overlap, and each hand-over waits for a slice.

Each value of --steps (attention.max_num_batched_tokens) starts both servers anew. Prompts that are
longer are computed in chunks.

--parts measures no times to compare: it starts only our side, and prints where the time of a layer
goes on both sides of it, for the longest prompt and each depth of --depths. Stage timestamps of
every step are on, and the tokens of the first value of --steps.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from afd.errors import AfdError
from afd.records import command_line, write_records
from afd_bench.gpu.common import (
    Budget,
    add_model,
    case_of,
    count,
    gpus_case,
    model_of,
    parser,
    usable_gpus,
)
from afd_bench.gpu.prefill_parts import print_parts
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.targets import PEER, Afd, Colocated, Sizes, fitted, vllm_args
from afd_bench.prefill import OURS, TRAFFIC_TOKENS, measure, records, table

_START_S = 100.0  # estimated time of a start and its measurements


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    budget, done = Budget(args.seconds), 0
    length = max(*args.lengths, TRAFFIC_TOKENS) + args.answer + 1
    model_slice, path = model_of(args, args.model, length)
    on_cpu = args.device == "cpu"
    gpus = 0 if on_cpu else min(2, usable_gpus())
    ours = fitted(Afd(1, 1), gpus)
    if args.parts:
        return _parts(args, replace(ours, stage_every=1), path, length)
    peer = Colocated(max(1, gpus), mode="eager" if on_cpu else args.peers)
    name = f"{case_of(args.model, model_slice)} {gpus_case(gpus)}"
    for step in args.steps:
        if not budget.allows(f"steps of {step} tokens", _START_S if done else 0.0):
            break
        sizes, flags = _sizes(args, length, step), _flags(args)
        with running([ours, peer], Setup(path, sizes, args.device, flags, args.logs)) as servers:
            if len(servers) < 2:
                raise AfdError("a comparison needs both servers; see the error above")
            both = {OURS: servers[ours], PEER: servers[peer]}
            found = asyncio.run(measure(both, args, f"{name}, step {step}"))
        done += 1
        made = records(found, "prefill", OURS, PEER, command_line("gpu prefill", argv).strip())
        print(table(made), flush=True)
        if args.out is not None:
            write_records(args.out, made)
    return 0 if done == len(args.steps) else 1


def _parts(args: argparse.Namespace, ours: Afd, path: Path, length: int) -> int:
    step, longest = args.steps[0], max(args.lengths)
    sizes = _sizes(args, length, step)
    with running([ours], Setup(path, sizes, args.device, _flags(args), args.logs)) as servers:
        rows = min(step, longest)
        asyncio.run(print_parts(servers[ours], args.depths, longest, rows, args.rounds))
    return 0


def _sizes(args: argparse.Namespace, length: int, step: int) -> Sizes:
    requests = max(args.together, args.streams + 1)
    return Sizes(requests, length, args.kv_gib, step_tokens=step)


def _flags(args: argparse.Namespace) -> list[str]:
    return [*vllm_args(args.device, False), *args.vllm_args]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = parser("prefill", __doc__, 200.0)
    add_model(options, "qwen3-30b-short")
    options.add_argument(
        "--peers", default="default", choices=("default", "graphs", "eager"),
        help="how colocated vLLM runs: with its defaults, only with CUDA graphs of decode steps,"
        " or eagerly",
    )  # fmt: skip
    options.add_argument(
        "--lengths", type=count, nargs="+", default=[128, 1024, 4096, 8192],
        help="tokens of a prompt",
    )  # fmt: skip
    options.add_argument("--steps", type=count, nargs="+", default=[2048], help="tokens of a step")
    options.add_argument("--together", type=count, default=2, help="prompts at once")
    options.add_argument("--streams", type=count, default=8, help="decoding requests")
    options.add_argument("--answer", type=count, default=96, help="tokens of a decoding request")
    options.add_argument("--rounds", type=count, default=3, help="turns per case and server")
    options.add_argument("--kv-gib", type=float, default=1.0, help="KV cache of a server, per GPU")
    options.add_argument("--parts", action="store_true", help="print where a layer's time goes")
    options.add_argument(
        "--depths", type=int, nargs="+", default=[3, 2, 1], choices=(1, 2, 3),
        help="micro-batches in flight, for --parts",
    )  # fmt: skip
    return options.parse_args(argv)
