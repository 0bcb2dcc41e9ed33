"""Time per token over thousands of steps: one streamed request among a steady decode load.

The moments at which its pieces arrive are those of the engine's steps, the same way for every
server. Since the contexts grow while it decodes, so does a step: the ratios are given as they are,
and with each time over the median of its neighbourhood ("steady").
"""

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from afd.bench.gpu.common import (
    Budget,
    Report,
    add_model,
    add_peers,
    case_of,
    model_of,
    parser,
    report,
)
from afd.bench.gpu.kv import kv_gib
from afd.bench.gpu.load import Load, client, held, moments
from afd.bench.gpu.targets import PEER, Afd, Sizes, Target, in_modes, parse, running, vllm_args
from afd.bench.servers import Server
from afd.errors import AfdError
from afd.planner.facts.model_hf import load_model

_NEAR = 250  # steps to either side
_FIRST = 32  # intervals left out: the server is not warm, and the prompts still come in


@dataclass(frozen=True)
class Jitter:
    """Milliseconds from token to token. steady: p99 over p50 of the times without their drift."""

    steps: int
    p50: float
    p99: float
    longest: float
    steady: float

    @property
    def ratio(self) -> float:
        return self.p99 / self.p50


def main(argv: Sequence[str]) -> int:
    made = parser("jitter", __doc__, 300.0)
    add_model(made, "qwen3-30b-short")
    made.add_argument("--targets", nargs="+", default=["1A1F", "TP2"], metavar="NAME")
    made.add_argument("--wire", default="exact", choices=("exact", "fp8"))
    made.add_argument(
        "--lookahead", action="store_true", help="pipeline.lookahead of our deployments"
    )
    add_peers(made)
    made.add_argument("--batch", type=int, default=64, help="requests at a time")
    made.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt, filled")
    made.add_argument("--steps", type=int, default=5_000)
    made.add_argument("--depth", type=int, default=3, choices=(1, 2, 3))
    args = made.parse_args(argv)
    budget = Budget(args.seconds)
    named = [parse(name, args.wire) for name in args.targets]
    targets = in_modes(named, (args.lookahead,), args.peers)
    piece, path = model_of(args, args.model)
    # The load's requests have to outlast the one that is timed.
    length = args.prompt + args.steps + args.steps // 4 + 256
    cache = kv_gib(targets, args.batch, length, load_model(str(path)))
    sizes = Sizes(args.batch, length, cache, (args.batch,))
    flags = [*vllm_args(args.device, True), *args.vllm_args]
    out = report("gpu", args, "jitter", argv)
    found: dict[Target, Jitter] = {}
    with running(targets, path, sizes, args.device, flags, args.logs) as servers:
        for target, server in servers.items():
            if not budget.allows(target.label):
                break
            if isinstance(target, Afd):
                server.set_depth(args.depth)
            load = Load(args.batch, args.prompt, length, piece.sizes.vocab, args.seed)
            try:
                found[target] = summary(asyncio.run(_times(server, load, args.steps)))
            except AfdError as err:
                print(f"{target.label}: FAILED: {err}", flush=True)
                continue
            _tell(target, found[target])
            _record(found, case_of(args.model, piece), args, out)
    return 0 if len(found) == len(targets) else 1


async def _times(server: Server, load: Load, steps: int) -> list[float]:
    """Seconds from each token of one request to its next, with ``load.requests`` - 1 others."""
    async with held(server, replace(load, requests=load.requests - 1)), client() as session:
        body = load.body(server, load.requests - 1, steps + _FIRST + 1)
        at = await moments(session, server, body, load.requests - 1)
    times = [b - a for a, b in pairwise(at)][_FIRST:]
    if len(times) < steps // 2:
        raise AfdError(
            f"{len(times)} pieces of {steps} tokens came; the server sends several tokens at once"
        )
    return times


def summary(times_s: Sequence[float]) -> Jitter:
    """Of at least 100 times from token to token."""
    flat = [time / near for time, near in zip(times_s, neighbourhood(times_s), strict=True)]
    ordered = sorted(times_s)
    return Jitter(
        len(times_s),
        1e3 * _quantile(ordered, 0.5),
        1e3 * _quantile(ordered, 0.99),
        1e3 * ordered[-1],
        _quantile(sorted(flat), 0.99) / _quantile(sorted(flat), 0.5),
    )


def neighbourhood(times: Sequence[float]) -> list[float]:
    """Median of the times around each one."""
    blocks = range(0, len(times), _NEAR)
    medians = [statistics.median(times[max(0, b - _NEAR) : b + 2 * _NEAR]) for b in blocks]
    return [medians[index // _NEAR] for index in range(len(times))]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def _tell(target: Target, j: Jitter) -> None:
    print(
        f"{target.label}: {j.steps} steps, p50 {j.p50:.3f} ms, p99 {j.p99:.3f}, max"
        f" {j.longest:.3f}; p99/p50 {j.ratio:.3f}, steady {j.steady:.3f}",
        flush=True,
    )


def _record(
    found: Mapping[Target, Jitter], model: str, args: argparse.Namespace, out: Report
) -> None:
    peers = [j for target, j in found.items() if not isinstance(target, Afd)]
    for target, j in found.items():
        if not isinstance(target, Afd) or not peers:
            continue
        case = f"{model} {target.label} depth {args.depth} batch {args.batch}"
        for metric, value, theirs, unit in (
            ("tpot_p99_over_p50", j.ratio, peers[0].ratio, "x"),
            ("tpot_p99_over_p50_steady", j.steady, peers[0].steady, "x"),
            ("tpot_p50", j.p50, peers[0].p50, "ms"),
            ("tpot_p99", j.p99, peers[0].p99, "ms"),
            ("tpot_max", j.longest, peers[0].longest, "ms"),
        ):
            out.add(case, metric, value, unit, PEER, theirs, more_is_better=False)
