"""Jitter: time per token over thousands of steps, of one streamed request in a steady decode load.

The arrival times of the stream's chunks show when the engine's steps end. This works for every
server. The context grows during the run, and steps with it. Ratios are therefore given twice: for
the times as measured, and for each time divided by the median of its neighbourhood ("steady").

Choosing the options:
- Host delays are most visible in short steps. The default of 4 layers and 64 requests gives steps
  of about 3 ms, which are host-bound. --model qwen3-30b --layers 48 --context 1024 to 4096 gives
  device-bound steps of 20 to 30 ms, as in production. The device time of a step is printed too.
- The KV cache must hold --batch requests of about --context + --steps + 800 tokens, with 96 KiB per
  token at 48 layers. Its size is printed before the servers start.
- Use --steps 5000 for a stable p99, and at least 1000. A run takes steps x time per token.
- --targets 1A1F measures only our deployment, which starts faster. --dummy-experts starts faster
  still and needs no disk space for experts.

Every run is compared with the aim, with the device time of a step, with its own median, and with
colocated vLLM if that is a target. The folder of --logs gets jitter-TARGET.json with all times in
order and the moments of the slowest steps, in which periodic delays are visible.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from afd.errors import AfdError, ConfigError
from afd_bench.gpu.common import (
    Budget,
    Report,
    add_model,
    add_peers,
    case_of,
    count,
    model_of,
    parser,
    report,
)
from afd_bench.gpu.kv import kv_bytes, kv_gib
from afd_bench.gpu.load import Load, client, device_step_s, held, moments, read
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.targets import PEER, Afd, Sizes, Target, in_modes, parse, vllm_args
from afd_bench.servers import Server
from afd_planner.facts.model_hf import load_model

AIM = 1.02
_NEAR = 250  # steps of a neighbourhood, on either side
_FIRST = 32  # skipped intervals: the server warms up, and other prompts are still prefilled
_LEAST = 100  # steps; fewer have no 99th percentile
_SLOWEST = 20


@dataclass(frozen=True)
class Slow:
    """One of the slowest steps.

    step: its number. at_s: its end, in seconds after the first step began. ms: its time. next_ms:
    time of the next step, which is short if only a chunk arrived late, and normal if the engine
    itself was delayed.
    """

    step: int
    at_s: float
    ms: float
    next_ms: float


@dataclass(frozen=True)
class Jitter:
    """Statistics of the times between tokens, in ms.

    steady: p99 / p50 of the times without drift. slowest: slowest steps, longest first. device:
    mean device time of a step of ours, if it replays graphs, else 0.
    """

    steps: int
    p50: float
    p99: float
    longest: float
    steady: float
    slowest: tuple[Slow, ...] = ()
    device: float = 0.0

    @property
    def ratio(self) -> float:
        return self.p99 / self.p50


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    budget = Budget(args.seconds)
    targets = _targets(args)
    # The other requests must outlast the timed one. The first of them decode while others start.
    length = args.context + args.steps + _FIRST + 500 + 4 * args.batch
    model_slice, path = model_of(args, args.model, length, experts=not args.dummy_experts)
    model = load_model(str(path))
    for target in targets:
        gib = kv_bytes(target, args.batch, length, model) / 2**30
        print(f"{target.label}: {gib:.1f} GiB of KV cache per GPU with a cache", flush=True)
    cache = kv_gib(targets, args.batch, length, model)
    sizes = Sizes(args.batch, length, cache, (args.batch,))
    flags = [*vllm_args(args.device, True), *args.vllm_args]
    out = report("gpu", args, "jitter", argv)
    found: dict[Target, Jitter] = {}
    with running(targets, Setup(path, sizes, args.device, flags, args.logs)) as servers:
        for target, server in servers.items():
            if not budget.allows(target.label):
                break
            load = Load(args.batch, args.context, length, model_slice.sizes.vocab, args.seed)
            try:
                if isinstance(target, Afd):
                    server.set_depth(args.depth)
                times, device_s = asyncio.run(_times(server, load, args.steps))
            except AfdError as err:
                print(f"{target.label}: FAILED: {err}", flush=True)
                continue
            found[target] = replace(summary(times), device=1e3 * device_s)
            _print(target, found[target], args.steps)
            _keep(target, times, found[target], args.logs)
            _record(found, case_of(args.model, model_slice), args, out)
    return 0 if found.keys() == set(targets) else 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = parser("jitter", __doc__, 300.0)
    add_model(options, "qwen3-30b-short")
    options.add_argument(
        "--targets", nargs="+", default=["1A1F", "TP2"], metavar="NAME",
        help="such as 1A1F, TP2 or DP2+EP",
    )  # fmt: skip
    options.add_argument("--wire", default="exact", choices=("exact", "fp8"), help="wire format")
    options.add_argument(
        "--lookahead", action="store_true", help="pipeline.lookahead of our deployments"
    )
    options.add_argument(
        "--dummy-experts",
        action="store_true",
        help="use random experts that are not in the checkpoint (ffn.load: dummy); no vLLM targets",
    )
    add_peers(options)
    options.add_argument("--batch", type=count, default=64, help="requests at a time")
    options.add_argument("--context", type=count, default=1024, help="tokens of a prompt, filled")
    options.add_argument("--steps", type=count, default=5_000, help="timed steps")
    options.add_argument(
        "--depth", type=int, default=3, choices=(1, 2, 3), help="micro-batches in flight"
    )
    args = options.parse_args(argv)
    if args.steps < _LEAST:
        raise ConfigError(f"--steps {args.steps} is too few for a p99; use {_LEAST} or more")
    return args


def _targets(args: argparse.Namespace) -> list[Target]:
    found = in_modes(
        [parse(name, args.wire) for name in args.targets], (args.lookahead,), args.peers
    )
    if not args.dummy_experts:
        return found
    ours: list[Target] = [replace(t, dummy=True) for t in found if isinstance(t, Afd)]
    if len(ours) < len(found):
        raise ConfigError(
            "--dummy-experts does not work with vLLM targets, which would compute with other"
            " weights; remove it, or use only topologies, such as --targets 1A1F"
        )
    return ours


async def _times(server: Server, load: Load, steps: int) -> tuple[list[float], float]:
    """Times one request among ``load.requests`` - 1 others.

    Returns (seconds between its consecutive tokens, mean device time of a step in seconds).
    """
    others = load.requests - 1
    async with held(server, replace(load, requests=others)), client() as session:
        body = load.body(server, others, steps + _FIRST + 1)
        first = await read(server)
        at = await moments(session, server, body, others)
        last = await read(server)
    if last.running < others:
        raise AfdError(
            f"only {last.running:.0f} of the {others} other requests ran until the timed one ended;"
            " lower --batch or --context, so that they start sooner"
        )
    times = [b - a for a, b in pairwise(at)][_FIRST:]
    if len(times) < max(_LEAST, steps // 2):
        raise AfdError(
            f"only {len(times)} chunks came for {steps} tokens, because the server sends several"
            " tokens per chunk; lower --batch"
        )
    return times, device_step_s(first, last)


def summary(times_s: Sequence[float]) -> Jitter:
    """Returns the statistics of at least 100 times between tokens, in seconds."""
    flat = [time / near for time, near in zip(times_s, neighbourhood(times_s), strict=True)]
    ordered = sorted(times_s)
    return Jitter(
        len(times_s),
        1e3 * _quantile(ordered, 0.5),
        1e3 * _quantile(ordered, 0.99),
        1e3 * ordered[-1],
        _quantile(sorted(flat), 0.99) / _quantile(sorted(flat), 0.5),
        slowest(times_s),
    )


def slowest(times_s: Sequence[float]) -> tuple[Slow, ...]:
    """Returns the 20 longest times with the moments at which they ended."""
    ends = list(accumulate(times_s))
    numbers = sorted(range(len(times_s)), key=lambda n: -times_s[n])[:_SLOWEST]
    return tuple(
        Slow(n, round(ends[n], 4), _ms(times_s[n]), _ms(sum(times_s[n + 1 : n + 2])))
        for n in numbers
    )


def neighbourhood(times: Sequence[float]) -> list[float]:
    """Returns for each time the median of the times around it."""
    blocks = range(0, len(times), _NEAR)
    medians = [statistics.median(times[max(0, b - _NEAR) : b + 2 * _NEAR]) for b in blocks]
    return [medians[index // _NEAR] for index in range(len(times))]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _print(target: Target, j: Jitter, steps: int) -> None:
    device = f", {j.device:.3f} on the device" if j.device else ""
    print(
        f"{target.label}: {j.steps} steps, p50 {j.p50:.3f} ms{device}, p99 {j.p99:.3f}, max"
        f" {j.longest:.3f}; p99/p50 {j.ratio:.3f}, steady {j.steady:.3f}",
        flush=True,
    )
    if j.steps < steps:
        print(
            f"  {steps - j.steps} tokens came in a chunk with the previous token; such a time is"
            " that of two steps"
        )
    words = [
        f"{s.step} at {s.at_s:.2f} s {s.ms:.1f}"
        for s in sorted(j.slowest, key=lambda slow: slow.step)
    ]
    print(f"  slowest, ms: {', '.join(words)}", flush=True)


def _keep(target: Target, times_s: Sequence[float], j: Jitter, logs: Path) -> None:
    """Writes a target's raw times, for the analysis of slow steps."""
    file = logs / f"jitter-{target.label.replace(' ', '-')}.json"
    file.write_text(json.dumps({**asdict(j), "ms": [_ms(time) for time in times_s]}) + "\n")
    print(f"  {file} written", flush=True)


def _record(
    found: Mapping[Target, Jitter], model: str, args: argparse.Namespace, out: Report
) -> None:
    """Records ours against the limits and against the fastest colocated vLLM so far.

    Called again after each target, so that records are updated when a faster peer is measured.
    """
    peers = [j for target, j in found.items() if not isinstance(target, Afd)]
    theirs = _values(min(peers, key=lambda peer: peer.p50)) if peers else {}
    for target, j in found.items():
        if not isinstance(target, Afd):
            continue
        case = f"{model} {target.label} depth {args.depth} batch {args.batch}"
        case += f" context {args.context}"
        limits = {"tpot_p50": ("step on the device", j.device)}
        for metric, value in _values(j).items():
            unit = "x" if "_over_" in metric else "ms"
            own = ("aim", AIM) if unit == "x" else ("its own p50", j.p50)
            for peer, limit in (limits.get(metric, own), (PEER, theirs.get(metric, 0.0))):
                if limit:
                    out.add(case, metric, value, unit, peer, limit, more_is_better=False)


def _values(j: Jitter) -> dict[str, float]:
    return {
        "tpot_p99_over_p50": j.ratio,
        "tpot_p99_over_p50_steady": j.steady,
        "tpot_p50": j.p50,
        "tpot_p99": j.p99,
        "tpot_max": j.longest,
    }
