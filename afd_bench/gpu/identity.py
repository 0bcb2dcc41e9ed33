"""Compares tokens and distributions of every topology with eager colocated vLLM.

Sends one workload (afd_bench/workload.py: mixed lengths, arrivals while others decode, shared
prefixes) to colocated vLLM and to each deployment at each depth, and compares greedy tokens and
next-token distributions. vLLM's kernels select tiles by the number of rows, so that in bfloat16 a
step split into micro-batches rounds differently. The yardsticks for this effect are colocated vLLM
against itself, with other arrivals and with CUDA graphs. All servers run at once; nothing is timed.
--over verbs runs the RDMA proxy on a libibverbs without hardware, --over tcp the staged path.

On GPUs the default expert backend rounds differently from vLLM.
--backend vllm_cuda runs vLLM's own expert kernels in the deployments instead.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

from afd.config.choices import choices
from afd.errors import AfdError, ConfigError
from afd_bench import stand_in_nic
from afd_bench.agreement import Agreement, compare, score
from afd_bench.cases import AUTO, MAX_LOGPROBS, SETTINGS
from afd_bench.gpu.common import (
    Budget,
    Report,
    add_model,
    case_of,
    model_of,
    parser,
    report,
    usable_gpus,
)
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.targets import (
    DEFAULT_BACKEND,
    PEER,
    Afd,
    Colocated,
    Sizes,
    Target,
    fitted,
    parse,
    vllm_args,
)
from afd_bench.measure import Scores, Workload, check_depth, forced, read_counters
from afd_bench.servers import Server
from afd_bench.workload import Answer, followers, matching, mixed, run

TOPOLOGIES = ("1A1F", "2A1F", "1A2F", "2A2F", "3A1F", "1A3F")
REFERENCE = Colocated(1, mode="eager")
_PROPAGATION_S = 0.3  # until the instances have received a new depth


@dataclass(frozen=True)
class Compared:
    """One run compared with the reference. match: fraction of requests with equal tokens."""

    case: str
    match: float
    agreement: Agreement


@dataclass(frozen=True)
class Reference:
    """The answers of eager colocated vLLM, and its distributions over these texts."""

    answers: list[Answer]
    scores: Scores


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a server failed, else 0. Raises ConfigError, AfdError."""
    args = _arguments(argv)
    budget = Budget(args.seconds)
    targets = [REFERENCE, Colocated(1), *variants(args)]
    model_slice, path = model_of(args, args.model, int(SETTINGS["max_model_len"]))
    model = case_of(args.model, model_slice)
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
    with running(targets, Setup(path, sizes, args.device, flags, args.logs)) as servers:
        failed = servers.keys() != set(targets)
        if REFERENCE not in servers:
            raise AfdError("colocated vLLM, the reference, did not start; see its error above")
        reference, itself = _reference(servers[REFERENCE], sets)
        _print(itself, model, out)
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
    options = parser("identity", __doc__, 400.0)
    add_model(options, "tiny")
    options.add_argument("--targets", nargs="+", metavar="NAME", help="topologies; default: all")
    options.add_argument(
        "--depths", type=int, nargs="+", default=[1, 2, 3], choices=(1, 2, 3),
        help="micro-batches in flight",
    )  # fmt: skip
    options.add_argument(
        "--wires", nargs="+", default=["exact"], choices=("exact", "fp8", "mxfp4"),
        help="wire formats",
    )  # fmt: skip
    options.add_argument(
        "--over", nargs="+", default=[AUTO], choices=(AUTO, "ipc", "tcp", "verbs"),
        help="backends of the transport",
    )  # fmt: skip
    options.add_argument(
        "--backend", default=DEFAULT_BACKEND, choices=tuple(choices("moe_backend")), metavar="NAME",
        help="ffn.backend of the deployments, such as vllm_cuda for vLLM's own expert kernels; one"
        f" of {', '.join(choices('moe_backend'))}; default: {DEFAULT_BACKEND}",
    )  # fmt: skip
    options.add_argument(
        "--eager", nargs="*", default=["1A1F"], metavar="NAME",
        help="topologies to run eagerly too",
    )  # fmt: skip
    options.add_argument(
        "--lookahead", nargs="*", default=["1A1F"], metavar="NAME",
        help="topologies to run with pipeline.lookahead too",
    )  # fmt: skip
    options.add_argument(
        "--shared-gpus", action="store_true",
        help="run topologies that need more GPUs than the host has, with shared GPUs",
    )  # fmt: skip
    options.add_argument(
        "--kv-gib", type=float, default=float(SETTINGS["kv_cache_gib"]),
        help="KV cache per GPU and server",
    )  # fmt: skip
    return options.parse_args(argv)


def variants(args: argparse.Namespace) -> list[Target]:
    """Returns the deployments to compare; on the exact wire and the usual transport also some eager
    or with lookahead."""
    gpus = usable_gpus()
    nic = str(stand_in_nic.build(args.logs.absolute())) if "verbs" in args.over else ""
    names = args.targets or [
        name
        for name in TOPOLOGIES
        if args.device == "cpu" or args.shared_gpus or parse(name).gpus <= max(2, gpus)
    ]
    found: list[Target] = []
    for name in names:
        for wire, over in product(args.wires, args.over):
            target = parse(name, wire)
            if not isinstance(target, Afd):
                raise ConfigError(f"{name} is not a topology; use deployments such as 2A2F")
            library = nic if over == "verbs" else ""
            target = replace(target, backend=args.backend, over=over, nic=library)
            if args.shared_gpus:
                target = fitted(target, gpus)
            found.append(target)
            if wire == "exact" and over == AUTO and args.device != "cpu":
                if name in args.lookahead:
                    found.append(replace(target, lookahead=True))
                if name in args.eager:
                    found.append(replace(target, graphs=False))
    return found


def _reference(server: Server, sets: Workload) -> tuple[Reference, Compared]:
    """Returns the reference, and its comparison with a second run with other arrivals."""
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
    """Makes every comparison of one server; prints and records each when it is done."""
    for found in _compared(target, server, reference, sets, args.depths, budget):
        _print(found, model, out)


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
        time.sleep(_PROPAGATION_S)
        before = read_counters(server.metrics()).steps
        found = against(f"{target.label} depth {depth}", f"depth{depth}")
        check_depth(before, read_counters(server.metrics()).steps, depth)
        yield found


def _answers(server: Server, sets: Workload, salt: str) -> list[Answer]:
    answers = run(server.url, server.model, sets.mixed, salt=salt)
    return answers + run(server.url, server.model, sets.followers, salt=salt)


def _print(one: Compared, model: str, out: Report) -> None:
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
