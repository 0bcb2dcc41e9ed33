"""`afd bench gpu`: deployments on the GPUs of this host against colocated vLLM on one of them.

``identity`` sends one workload (afd/bench/workload.py) to colocated vLLM and to 1A1F deployments,
eager and with graphs, with either wire, at each depth, and compares greedy tokens and next-token
distributions. vLLM's kernels choose their tiles by the number of rows, so in bfloat16 a step cut
into micro-batches rounds differently: the yardstick is colocated vLLM against itself with other
arrivals. All servers run at once; nothing is timed.

``decode`` keeps a fixed number of requests decoding on one deployment and prints, per depth, the
time of a step on the device and from step to step.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from afd.bench.agreement import Agreement, compare, score
from afd.bench.cases import MAX_LOGPROBS, SETTINGS, tiny_model
from afd.bench.measure import Scores, check_depth, forced, read_counters
from afd.bench.measure import Workload as RequestSets
from afd.bench.records import Record, machine, today, write_records
from afd.bench.servers import Server, colocated, disaggregated
from afd.bench.workload import (
    FIRST_TOKEN,
    Answer,
    followers,
    matching,
    mixed,
    open_session,
    post_completion,
    run,
)
from afd.errors import AfdError

START_S = 400.0
PEER = "vllm colocated"
_SETTLE_S = 0.3  # the depth reaches the instances with the next message of the control plane


@dataclass(frozen=True)
class Variant:
    """One deployment: its wire format, and whether decode steps are replayed as graphs."""

    wire: str
    graphs: bool

    @property
    def name(self) -> str:
        return f"1A1F {self.wire} {'graphs' if self.graphs else 'eager'}"


@dataclass(frozen=True)
class Compared:
    """One run against the reference: requests with equal tokens (0 to 1) and distributions."""

    case: str
    match: float
    agreement: Agreement


Reference = tuple[list[Answer], Scores, Compared]


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 if a deployment failed."""
    args = _arguments(argv)
    model = args.model or tiny_model(args.models, "qwen3_moe")
    if args.what == "decode":
        return decode(model, args)
    variants = [Variant(wire, graphs) for wire in args.wire for graphs in args.graphs]
    found, failed = identity(model, variants, args.depths, args.vllm_args, args.seed)
    for one in found:
        a = one.agreement
        print(
            f"{one.case:36s} tokens equal {one.match:6.1%}  top-1 {a.top1:.4f}  KL {a.kl:.2e}"
            f"  ({a.positions} positions)",
            flush=True,
        )
    for name, why in failed.items():
        print(f"{name}: FAILED: {why}", flush=True)
    if args.out:
        command = " ".join(["afd bench gpu", *argv])
        write_records(args.out, [record for one in found for record in _records(one, command)])
    return 1 if failed else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench gpu", description=__doc__)
    parser.add_argument("what", choices=("identity", "decode"))
    parser.add_argument("--model", type=Path, help="checkpoint; default: the tiny Qwen3-MoE")
    parser.add_argument(
        "--models", type=Path, default=Path("models"), help="tiny models, made if missing"
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3], choices=(1, 2, 3))
    parser.add_argument("--wire", nargs="+", default=["exact", "fp8"], choices=("exact", "fp8"))
    parser.add_argument(
        "--graphs", nargs="+", type=lambda s: s == "on", default=[False, True], metavar="on|off"
    )
    parser.add_argument(
        "--vllm-args", nargs="*", default=[], help="for every vLLM, ours and theirs"
    )
    parser.add_argument("--batch", type=int, default=192, help="decode: requests at a time")
    parser.add_argument("--prompt", type=int, default=64, help="decode: tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=400, help="decode: tokens of an answer")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts and arrivals")
    parser.add_argument("--out", type=Path, help="result records, as JSON")
    return parser.parse_args(argv)


def identity(
    model: Path,
    variants: Sequence[Variant],
    depths: Sequence[int],
    vllm_args: Sequence[str],
    seed: int,
) -> tuple[list[Compared], dict[str, str]]:
    """Every variant at every depth against colocated vLLM; and why what failed did."""
    sets = RequestSets(mixed(seed, vocab=MAX_LOGPROBS), followers(seed, vocab=MAX_LOGPROBS))
    found: list[Compared] = []
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(len(variants) + 1) as pool:
        reference = pool.submit(_reference, model, sets, vllm_args)
        jobs = [
            (v, pool.submit(_variant, model, v, depths, vllm_args, sets, reference.result))
            for v in variants
        ]
        try:
            found.append(reference.result()[2])
        except AfdError as err:
            return [], {PEER: str(err)}
        for variant, job in jobs:
            try:
                found += job.result()
            except AfdError as err:
                failed[variant.name] = str(err)
    return found, failed


def _reference(model: Path, sets: RequestSets, vllm_args: Sequence[str]) -> Reference:
    """Answers and distributions of colocated vLLM, and how far it is from itself."""
    with colocated(
        model.absolute(),
        dtype="bfloat16",
        max_model_len=int(SETTINGS["max_model_len"]),
        max_num_seqs=int(SETTINGS["max_num_seqs"]),
        max_num_batched_tokens=int(SETTINGS["max_num_batched_tokens"]),
        kv_cache_gib=SETTINGS["kv_cache_gib"],
        vllm_args=[f"--max-logprobs={MAX_LOGPROBS}", *vllm_args],
        gpu=0,
        deadline_s=START_S,
    ) as server:
        answers = _answers(server, sets, "first")
        again = _answers(server, sets.reordered(), "second")
        texts = forced(sets, answers)
        scores = score(server.url, server.model, texts)
        batched = score(server.url, server.model, texts, at_once=True)
        itself = Compared(
            "colocated eager, other arrivals", matching(again, answers), compare(scores, batched)
        )
        return answers, scores, itself


def _variant(
    model: Path,
    variant: Variant,
    depths: Sequence[int],
    vllm_args: Sequence[str],
    sets: RequestSets,
    reference: Callable[[], Reference],
) -> list[Compared]:
    with disaggregated(
        deployment(model, variant, max(depths), vllm_args), deadline_s=START_S
    ) as server:
        answers, scores, _ = reference()
        found = []
        for depth in depths:
            server.set_depth(depth)
            time.sleep(_SETTLE_S)
            before = read_counters(server.metrics()).steps
            ours = _answers(server, sets, f"depth{depth}")
            theirs = score(server.url, server.model, forced(sets, answers))
            check_depth(before, read_counters(server.metrics()).steps, depth)
            name = f"{variant.name} depth {depth}"
            found.append(Compared(name, matching(ours, answers), compare(scores, theirs)))
        return found


def decode(model: Path, args: argparse.Namespace) -> int:
    """Step times at each depth, one wire after the other. Prints a table."""
    sizes = {
        "max_model_len": args.prompt + args.tokens + 16,
        "max_num_seqs": args.batch,
        "max_num_batched_tokens": max(1024, args.batch),
        "kv_cache_gib": 8.0,
    }
    for wire in args.wire:
        variant = Variant(wire, graphs=True)
        config = deployment(model, variant, max(args.depths), args.vllm_args, sizes)
        with disaggregated(config, deadline_s=START_S) as server:
            for depth in args.depths:
                server.set_depth(depth)
                time.sleep(_SETTLE_S)
                timing = steady_decode(server, args.batch, args.prompt, args.tokens, depth)
                print(
                    f"1A1F {wire} depth {depth}: batch {args.batch}, step on the device"
                    f" {timing.device_s * 1e3:.3f} ms, from step to step {timing.step_s * 1e3:.3f}"
                    f" ms, {timing.steps} steps",
                    flush=True,
                )
    return 0


@dataclass(frozen=True)
class StepTiming:
    """Means over ``steps`` steps: on the device, and from one step to the next."""

    device_s: float
    step_s: float
    steps: int


def steady_decode(server: Server, batch: int, prompt: int, tokens: int, depth: int) -> StepTiming:
    """``batch`` requests decode together; measured in the middle, when all of them run.

    Raises:
        AfdError: a request failed, or no step was replayed at this depth.
    """
    draw = random.Random(depth)
    bodies = [
        {
            "model": server.model,
            "prompt": [draw.randrange(FIRST_TOKEN, MAX_LOGPROBS) for _ in range(prompt)],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        for _ in range(batch)
    ]

    async def run_all() -> None:
        async with open_session() as session:
            await asyncio.gather(*(post_completion(session, server.url, b) for b in bodies))

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(asyncio.run, run_all())
        while sample_sum(server.metrics(), "vllm:num_requests_running") < batch:
            if job.done():
                job.result()
                raise AfdError(f"{batch} requests never ran together; raise --tokens")
            time.sleep(0.02)
        time.sleep(0.2)
        first, then = _read(server, depth)
        while not job.done() and _read(server, depth)[0][0] - first[0] < tokens // 2:
            time.sleep(0.05)
        last, now = _read(server, depth)
        job.result()
    steps = int(last[0] - first[0])
    if steps == 0:
        raise AfdError(f"no step was replayed at depth {depth}; see the log of attention-0")
    return StepTiming((last[1] - first[1]) / steps, (now - then) / steps, steps)


def _read(server: Server, depth: int) -> tuple[tuple[float, float], float]:
    """((replayed steps, their seconds), the moment)."""
    text = server.metrics()
    moment = time.monotonic()
    steps = sample_sum(text, "afd_graph_steps_total", depth)
    return (steps, sample_sum(text, "afd_graph_step_seconds_total", depth)), moment


def sample_sum(exposition: str, name: str, depth: int | None = None) -> float:
    """Sum of a metric's samples, of one depth if it is given."""
    total = 0.0
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("depth") in (None, str(depth)):
                total += sample.value
    return total


def deployment(
    model: Path,
    variant: Variant,
    max_depth: int,
    vllm_args: Sequence[str],
    sizes: Mapping[str, int | float] = SETTINGS,
) -> dict[str, object]:
    """Contents of the deployment file of a variant. sizes: of its attention section."""
    return {
        "model": str(model.absolute()),
        "attention": {
            **sizes,
            "device": "cuda",
            "dtype": "bfloat16",
            "vllm_args": [f"--max-logprobs={MAX_LOGPROBS}", *vllm_args],
        },
        "ffn": {"device": "cuda"},
        "pipeline": {"depth": max_depth, "min_rows": 1, "graphs": variant.graphs},
        "wire": {"format": variant.wire},
        "control": {"timeout_s": 15.0},
        "deadlines": {"start_s": START_S},
    }


def _answers(server: Server, sets: RequestSets, salt: str) -> list[Answer]:
    answers = run(server.url, server.model, sets.mixed, salt=salt)
    return answers + run(server.url, server.model, sets.followers, salt=salt)


def _records(one: Compared, command: str) -> list[Record]:
    values = [
        ("match", one.match, "fraction of requests", 1.0),
        ("top1", one.agreement.top1, "fraction of positions", 1.0),
        ("kl", one.agreement.kl, "nats", 0.0),
    ]
    return [
        Record(
            bench="gpu",
            case=one.case,
            metric=metric,
            value=value,
            unit=unit,
            peer=PEER,
            peer_value=peer,
            ratio=value / peer if peer else float(value == peer),
            machine=machine(),
            command=command,
            date=today(),
        )
        for metric, value, unit, peer in values
    ]
