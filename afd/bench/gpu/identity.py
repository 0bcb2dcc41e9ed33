"""Tokens and distributions of every topology against eager colocated vLLM.

One workload (afd/bench/workload.py: mixed lengths, arrivals while others decode, shared prefixes)
goes to colocated vLLM and to each deployment, at each depth, and greedy tokens and next-token
distributions are compared. vLLM's kernels choose their tiles by the number of rows, so in bfloat16
a step cut into micro-batches rounds differently: the yardsticks are colocated vLLM against itself
with other arrivals, and with its own graphs. All servers run at once; nothing is timed.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from afd.bench.agreement import Agreement, compare, score
from afd.bench.cases import MAX_LOGPROBS, SETTINGS
from afd.bench.gpu.common import (
    Budget,
    Report,
    add_model,
    case_of,
    model_of,
    parser,
    report,
)
from afd.bench.gpu.targets import (
    PEER,
    Afd,
    Colocated,
    Sizes,
    Target,
    fitted,
    parse,
    running,
    vllm_args,
)
from afd.bench.measure import Scores, Workload, check_depth, forced, read_counters
from afd.bench.records import gpu_names
from afd.bench.servers import Server
from afd.bench.workload import Answer, followers, matching, mixed, run
from afd.errors import AfdError, ConfigError

TOPOLOGIES = ("1A1F", "2A1F", "1A2F", "2A2F", "3A1F", "1A3F")
REFERENCE = Colocated(1, mode="eager")
_SETTLE_S = 0.3  # the depth reaches the instances with the next message of the control plane


@dataclass(frozen=True)
class Compared:
    """One run against the reference: requests with equal tokens (0 to 1) and distributions."""

    case: str
    match: float
    agreement: Agreement


@dataclass(frozen=True)
class Reference:
    """What eager colocated vLLM answered, and its distributions over those texts."""

    answers: list[Answer]
    scores: Scores


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 if a server failed."""
    args = _arguments(argv)
    budget = Budget(args.seconds)
    targets = [REFERENCE, Colocated(1), *variants(args)]
    piece, path = model_of(args, args.model, int(SETTINGS["max_model_len"]))
    model = case_of(args.model, piece)
    sizes = Sizes(
        int(SETTINGS["max_num_seqs"]),
        int(SETTINGS["max_model_len"]),
        args.kv_gib,
        step_tokens=int(SETTINGS["max_num_batched_tokens"]),
    )
    flags = [*vllm_args(args.device, False), f"--max-logprobs={MAX_LOGPROBS}", *args.vllm_args]
    sets = Workload(mixed(args.seed, vocab=MAX_LOGPROBS), followers(args.seed, vocab=MAX_LOGPROBS))
    out = report("gpu", args, "identity", argv)
    failed = False
    with running(targets, path, sizes, args.device, flags, args.logs) as servers:
        failed = servers.keys() != set(targets)
        if REFERENCE not in servers:
            raise AfdError("without colocated vLLM there is nothing to compare with; see above")
        reference, itself = _reference(servers[REFERENCE], sets)
        _tell(itself, model, out)
        others = {target: server for target, server in servers.items() if target != REFERENCE}
        with ThreadPoolExecutor(len(others)) as pool:
            jobs = {
                target: pool.submit(_all, target, server, reference, sets, args, model, budget, out)
                for target, server in others.items()
            }
            for target, job in jobs.items():
                try:
                    job.result()
                except AfdError as err:
                    print(f"{target.label}: FAILED: {err}", flush=True)
                    failed = True
    return 1 if failed else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    made = parser("identity", __doc__, 400.0)
    add_model(made, "tiny")
    made.add_argument("--targets", nargs="+", metavar="NAME", help="topologies; default: all")
    made.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3], choices=(1, 2, 3))
    made.add_argument("--wires", nargs="+", default=["exact"], choices=("exact", "fp8", "mxfp4"))
    made.add_argument(
        "--eager", nargs="*", default=["1A1F"], metavar="NAME", help="topologies run eagerly too"
    )
    made.add_argument(
        "--lookahead", nargs="*", default=["1A1F"], metavar="NAME",
        help="topologies run with pipeline.lookahead too",
    )  # fmt: skip
    made.add_argument(
        "--shared-gpus", action="store_true",
        help="topologies of more GPUs than there are share them",
    )  # fmt: skip
    made.add_argument("--kv-gib", type=float, default=float(SETTINGS["kv_cache_gib"]))
    return made.parse_args(argv)


def variants(args: argparse.Namespace) -> list[Target]:
    """Every deployment to compare; on the exact wire some with lookahead and eagerly too."""
    gpus = len(gpu_names())
    names = args.targets or [
        name
        for name in TOPOLOGIES
        if args.device == "cpu" or args.shared_gpus or parse(name).gpus <= max(2, gpus)
    ]
    found: list[Target] = []
    for name in names:
        for wire in args.wires:
            target = parse(name, wire)
            if not isinstance(target, Afd):
                raise ConfigError(f"{name} is no topology; name deployments such as 2A2F")
            if args.shared_gpus:
                target = fitted(target, gpus)
            found.append(target)
            if wire == "exact" and args.device != "cpu":
                if name in args.lookahead:
                    found.append(replace(target, lookahead=True))
                if name in args.eager:
                    found.append(replace(target, graphs=False))
    return found


def _reference(server: Server, sets: Workload) -> tuple[Reference, Compared]:
    """And how far colocated vLLM is from itself when arrivals and batches differ."""
    answers = _answers(server, sets, "first")
    again = _answers(server, sets.reordered(), "second")
    texts = forced(sets, answers)
    scores = score(server.url, server.model, texts)
    batched = score(server.url, server.model, texts, at_once=True)
    itself = Compared(
        "colocated eager, other arrivals", matching(again, answers), compare(scores, batched)
    )
    return Reference(answers, scores), itself


def _all(
    target: Target,
    server: Server,
    reference: Reference,
    sets: Workload,
    args: argparse.Namespace,
    model: str,
    budget: Budget,
    out: Report,
) -> None:
    """Every comparison of one server, told as it comes."""
    for found in _compared(target, server, reference, sets, args.depths, budget):
        _tell(found, model, out)


def _compared(
    target: Target,
    server: Server,
    reference: Reference,
    sets: Workload,
    depths: Sequence[int],
    budget: Budget,
) -> Iterator[Compared]:
    def against(case: str, salt: str) -> Compared:
        ours = _answers(server, sets, salt)
        theirs = score(server.url, server.model, forced(sets, reference.answers))
        return Compared(case, matching(ours, reference.answers), compare(reference.scores, theirs))

    if isinstance(target, Colocated):
        yield against("colocated with graphs", "graphs")
        return
    for depth in depths:
        if not budget.allows(f"{target.label} depth {depth}"):
            return
        server.set_depth(depth)
        time.sleep(_SETTLE_S)
        before = read_counters(server.metrics()).steps
        found = against(f"{target.label} depth {depth}", f"depth{depth}")
        check_depth(before, read_counters(server.metrics()).steps, depth)
        yield found


def _answers(server: Server, sets: Workload, salt: str) -> list[Answer]:
    answers = run(server.url, server.model, sets.mixed, salt=salt)
    return answers + run(server.url, server.model, sets.followers, salt=salt)


def _tell(one: Compared, model: str, out: Report) -> None:
    a = one.agreement
    print(
        f"{one.case:36s} tokens equal {one.match:6.1%}  top-1 {a.top1:.4f}  KL {a.kl:.2e}"
        f"  ({a.positions} positions)",
        flush=True,
    )
    case = f"{model} {one.case}"
    out.add(case, "match", one.match, "fraction of requests", PEER, 1.0)
    out.add(case, "top1", a.top1, "fraction of positions", PEER, 1.0)
    out.add(case, "kl", a.kl, "nats", PEER, 0.0, more_is_better=False)
