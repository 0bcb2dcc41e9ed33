"""Time per token over thousands of steps: one streamed request among a steady decode load.

The moments at which its pieces arrive are those of the engine's steps, the same way for every
server. Since the contexts grow while it decodes, so does a step: the ratios are given as they are,
and with each time over the median of its neighbourhood ("steady").

How to choose. The host's milliseconds show most in short steps: 4 layers and a batch of 64 are
steps of 3 ms, bound by the host; --model qwen3-30b --layers 48 --batch 64 --context 1024 to 4096
are bound by the device, 20 to 30 ms as users get them. The time on the device is printed beside.
The cache has to hold --batch requests of about --context + --steps + 800 tokens, of 96 KiB each
with 48 layers; its size is printed before anything starts. --steps: 5000 for a steady p99, 1000 at
least; a run takes steps x time per token.

--targets 1A1F alone measures ours alone, which starts sooner; --dummy-experts sooner still, and
takes no disk for them. Every run compares with the aim, the step on the device and its own median;
colocated vLLM, if it is among the targets, is compared with besides. DIR of --logs gets
jitter-TARGET.json: all times in order, and the slowest with their moments, in which a period shows.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from afd.bench.gpu.common import (
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
from afd.bench.gpu.kv import kv_bytes, kv_gib
from afd.bench.gpu.load import Load, client, device_step_s, held, moments, read
from afd.bench.gpu.targets import PEER, Afd, Sizes, Target, in_modes, parse, running, vllm_args
from afd.bench.servers import Server
from afd.errors import AfdError, ConfigError
from afd.planner.facts.model_hf import load_model

AIM = 1.02
_NEAR = 250  # steps to either side
_FIRST = 32  # intervals left out: the server is not warm, and the prompts still come in
_LEAST = 100  # steps, below which there is no 99th percentile
_SLOWEST = 20


@dataclass(frozen=True)
class Slow:
    """One of the slowest steps: its number, when it ended (s after the first began), its time. The
    next one is short if only its piece came late, and as usual if the engine stood still."""

    step: int
    at_s: float
    ms: float
    next_ms: float


@dataclass(frozen=True)
class Jitter:
    """Milliseconds from token to token. steady: p99 over p50 of the times without their drift.
    device: mean time of a step on the device, where ours replayed graphs; else 0. slowest: longest
    first."""

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
    # The load's requests have to outlast the one that is timed: the first decode while others come.
    length = args.context + args.steps + _FIRST + 500 + 4 * args.batch
    piece, path = model_of(args, args.model, length, experts=not args.dummy_experts)
    model = load_model(str(path))
    for target in targets:
        gib = kv_bytes(target, args.batch, length, model) / 2**30
        print(f"{target.label}: {gib:.1f} GiB of KV cache per GPU that has one", flush=True)
    cache = kv_gib(targets, args.batch, length, model)
    sizes = Sizes(args.batch, length, cache, (args.batch,))
    flags = [*vllm_args(args.device, True), *args.vllm_args]
    out = report("gpu", args, "jitter", argv)
    found: dict[Target, Jitter] = {}
    with running(targets, path, sizes, args.device, flags, args.logs) as servers:
        for target, server in servers.items():
            if not budget.allows(target.label):
                break
            load = Load(args.batch, args.context, length, piece.sizes.vocab, args.seed)
            try:
                if isinstance(target, Afd):
                    server.set_depth(args.depth)
                times, device_s = asyncio.run(_times(server, load, args.steps))
            except AfdError as err:
                print(f"{target.label}: FAILED: {err}", flush=True)
                continue
            found[target] = replace(summary(times), device=1e3 * device_s)
            _tell(target, found[target], args.steps)
            _keep(target, times, found[target], args.logs)
            _record(found, case_of(args.model, piece), args, out)
    return 0 if found.keys() == set(targets) else 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    made = parser("jitter", __doc__, 300.0)
    add_model(made, "qwen3-30b-short")
    made.add_argument("--targets", nargs="+", default=["1A1F", "TP2"], metavar="NAME")
    made.add_argument("--wire", default="exact", choices=("exact", "fp8"))
    made.add_argument(
        "--lookahead", action="store_true", help="pipeline.lookahead of our deployments"
    )
    made.add_argument(
        "--dummy-experts",
        action="store_true",
        help="ours alone: experts are random (ffn.load: dummy) and not in the checkpoint",
    )
    add_peers(made)
    made.add_argument("--batch", type=count, default=64, help="requests at a time")
    made.add_argument("--context", type=count, default=1024, help="tokens of a prompt, filled")
    made.add_argument("--steps", type=count, default=5_000)
    made.add_argument("--depth", type=int, default=3, choices=(1, 2, 3))
    args = made.parse_args(argv)
    if args.steps < _LEAST:
        raise ConfigError(f"--steps {args.steps} have no 99th percentile; {_LEAST} are the fewest")
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
            "--dummy-experts are for ours alone, vLLM would compute with other weights; leave it"
            " out, or name topologies such as --targets 1A1F only"
        )
    return ours


async def _times(server: Server, load: Load, steps: int) -> tuple[list[float], float]:
    """Seconds from each token of one request to its next, with ``load.requests`` - 1 others, and of
    a step on the device."""
    others = load.requests - 1
    async with held(server, replace(load, requests=others)), client() as session:
        body = load.body(server, others, steps + _FIRST + 1)
        first = await read(server)
        at = await moments(session, server, body, others)
        last = await read(server)
    if last.running < others:
        raise AfdError(
            f"{last.running:.0f} of the {others} other requests were left when the timed one ended;"
            " lower --batch or --context, so that they begin sooner"
        )
    times = [b - a for a, b in pairwise(at)][_FIRST:]
    if len(times) < max(_LEAST, steps // 2):
        raise AfdError(
            f"{len(times)} pieces of {steps} tokens came; the server sends several tokens at once"
        )
    return times, device_step_s(first, last)


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
        slowest(times_s),
    )


def slowest(times_s: Sequence[float]) -> tuple[Slow, ...]:
    """The 20 longest of the times, with the moments at which they ended."""
    ends = list(accumulate(times_s))
    numbers = sorted(range(len(times_s)), key=lambda n: -times_s[n])[:_SLOWEST]
    return tuple(
        Slow(n, round(ends[n], 4), _ms(times_s[n]), _ms(sum(times_s[n + 1 : n + 2])))
        for n in numbers
    )


def neighbourhood(times: Sequence[float]) -> list[float]:
    """Median of the times around each one."""
    blocks = range(0, len(times), _NEAR)
    medians = [statistics.median(times[max(0, b - _NEAR) : b + 2 * _NEAR]) for b in blocks]
    return [medians[index // _NEAR] for index in range(len(times))]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _tell(target: Target, j: Jitter, steps: int) -> None:
    device = f", {j.device:.3f} on the device" if j.device else ""
    print(
        f"{target.label}: {j.steps} steps, p50 {j.p50:.3f} ms{device}, p99 {j.p99:.3f}, max"
        f" {j.longest:.3f}; p99/p50 {j.ratio:.3f}, steady {j.steady:.3f}",
        flush=True,
    )
    if j.steps < steps:
        print(
            f"  {steps - j.steps} tokens came with the one before them, whose time is of two steps"
        )
    words = [
        f"{s.step} at {s.at_s:.2f} s {s.ms:.1f}"
        for s in sorted(j.slowest, key=lambda slow: slow.step)
    ]
    print(f"  slowest, ms: {', '.join(words)}", flush=True)


def _keep(target: Target, times_s: Sequence[float], j: Jitter, logs: Path) -> None:
    """Raw data of a target, for whoever looks for the cause of slow steps."""
    file = logs / f"jitter-{target.label.replace(' ', '-')}.json"
    file.write_text(json.dumps({**asdict(j), "ms": [_ms(time) for time in times_s]}) + "\n")
    print(f"  {file} written", flush=True)


def _record(
    found: Mapping[Target, Jitter], model: str, args: argparse.Namespace, out: Report
) -> None:
    """Ours against limits, and against the quickest colocated vLLM measured so far; again when one
    comes."""
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
