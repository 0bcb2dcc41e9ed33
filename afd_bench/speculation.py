"""`afd bench speculation`: 1A1F with speculation, the same without, and colocated vLLM with it.

The three servers of a method run at once and are measured in turns. Greedy requests, all at once.

- tokens_per_s: generated tokens per second. Peers: `without` (the same deployment), and colocated
  vLLM with the same speculation.
- accepted: share of the draft tokens that were accepted. Peer: colocated vLLM.
- match: share of the requests whose tokens are those of the run without speculation.

ngram runs the demo model, which is trained, on prompts that repeat a few sentences. The other
methods run random models, in which a few tokens are nearly always the likeliest: how many of their
drafts are accepted says nothing about published models.

One GPU (`--device cuda`) is shared by all servers; decode steps are replayed as graphs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from afd.devices import DEVICES
from afd.errors import AfdError
from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench.gpu.targets import START_S, Colocated, compilation
from afd_bench.servers import Server, colocated, disaggregated
from afd_bench.workload import FIRST_TOKEN, open_session, post_completion
from afd_demo.published.eagle import make_eagle
from afd_demo.published.make import make_published
from afd_demo.sizes import PRESETS
from afd_launch.demo import FOLDER

OURS, WITHOUT, PEER = "1A1F", "without", "vllm colocated"
_LIKELY = 4
_NAMES = ("Anna", "Ben", "Cara", "Dan", "Ella", "Finn", "Gwen", "Hugo")
_THINGS = ("a red ball", "a blue cup", "a green hat", "a black cat", "a small boat", "a big drum")
Prompt = str | list[int]


@dataclass(frozen=True)
class Method:
    """layout: of the random checkpoint (afd_demo/published); "": the demo model.

    speculation: the section attention.speculation, but for the number of tokens and the head.
    """

    layout: str
    speculation: Mapping[str, object]


METHODS = {
    "ngram": Method("", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}),
    "mtp": Method("glm4_moe", {"method": "mtp"}),
    "eagle3": Method("qwen3_moe", {"method": "eagle3"}),
}


@dataclass
class Found:
    """What one server answered. tokens_per_s: by round. drafted, accepted: tokens of all rounds."""

    answers: list[list[int]] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    drafted: float = 0.0
    accepted: float = 0.0

    @property
    def rate(self) -> float:
        return statistics.median(self.tokens_per_s)

    @property
    def share(self) -> float:
        """Share of the drafts that were accepted; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a method failed, else 0."""
    args = _arguments(argv)
    failed = False
    for name in args.methods:
        method, began = METHODS[name], time.monotonic()
        try:
            with _servers(args, name, method) as servers:
                print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
                found = asyncio.run(_measure(servers, _prompts(args, method), args))
        except AfdError as error:
            print(f"{name}: FAILED: {error}", flush=True)
            failed = True
            continue
        made = _records(found, args, name, command_line("speculation", argv).strip())
        for one in made:
            peer = f"{one.peer}: {one.peer_value:.3f}"
            print(f"{one.case:44} {one.metric:13} {one.value:9.3f}  {peer:26} {one.ratio:6.2f}")
        if args.out is not None:
            write_records(args.out, made)
    return 1 if failed else 0


@contextlib.contextmanager
def _servers(args: argparse.Namespace, name: str, method: Method) -> Iterator[dict[str, Server]]:
    """Starts the three servers at once. Raises AfdError: one did not start."""
    model = _checkpoint(args.models, method)
    drafts = {**method.speculation, "num_speculative_tokens": args.drafts}
    if name == "eagle3":
        drafts["model"] = str(_head(model))
    print(f"{name}: starting {OURS}, {OURS} {WITHOUT} speculation, and {PEER}", flush=True)
    starts = {
        OURS: disaggregated(_config(args, model, drafts), deadline_s=START_S),
        WITHOUT: disaggregated(_config(args, model, None), deadline_s=START_S),
        PEER: _colocated(args, model, drafts),
    }
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(starts)) as pool:
            jobs = {key: pool.submit(one.__enter__) for key, one in starts.items()}
        errors = {key: job.exception() for key, job in jobs.items()}
        for key, one in starts.items():
            if errors[key] is None:
                stack.push(one)
        if bad := [f"{key}: {error}" for key, error in errors.items() if error is not None]:
            raise AfdError("; ".join(bad))
        yield {key: job.result() for key, job in jobs.items()}


def _checkpoint(folder: Path, method: Method) -> Path:
    if not method.layout:
        return FOLDER / "afd-tiny-chat"
    path = folder / f"speculation-{method.layout}"
    if not (path / "config.json").exists():
        make_published(method.layout, path, PRESETS["bench"], likely=_LIKELY)
    return path.absolute()


def _head(model: Path) -> Path:
    path = model.with_name(f"{model.name}-head")
    if not (path / "config.json").exists():
        make_eagle("eagle3", path, PRESETS["bench"], likely=_LIKELY)
    return path


def _config(
    args: argparse.Namespace, model: Path, speculation: Mapping[str, object] | None
) -> dict[str, object]:
    on_gpu = args.device != "cpu"
    return {
        "model": str(model),
        "gpus": 1 if on_gpu else None,
        "attention": {
            **_settings(args),
            "device": args.device,
            "dtype": _dtype(args),
            "speculation": speculation,
            "vllm_args": ["--gpu-memory-utilization=0.05"] if on_gpu else [],
        },
        "ffn": {"device": args.device, "late_ms": 20_000.0},
        "pipeline": {"depth": args.depth},
        "control": {"timeout_s": 15.0},
        "deadlines": {"start_s": START_S, "stuck_s": 60.0},
        "restart": {"standby": False},
    }


def _settings(args: argparse.Namespace) -> dict[str, Any]:  # values of several types
    return {
        "max_model_len": 1024,
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": 1024,
        "kv_cache_gib": 0.5,
    }


def _dtype(args: argparse.Namespace) -> str:
    """float32 on CPUs, so that the tokens can be compared."""
    return "float32" if args.device == "cpu" else "bfloat16"


def _colocated(
    args: argparse.Namespace, model: Path, speculation: Mapping[str, object]
) -> contextlib.AbstractContextManager[Server]:
    flags = [f"--speculative-config={json.dumps(speculation)}"]
    on_gpu = args.device != "cpu"
    if on_gpu:
        graphs = compilation(Colocated(1, mode="graphs"))
        flags += [
            "--gpu-memory-utilization=0.05",
            f"--compilation-config={json.dumps(graphs)}",
        ]
    return colocated(
        model,
        dtype=_dtype(args),
        vllm_args=flags,
        compiled=on_gpu,
        gpus=(0,) if on_gpu else (),
        deadline_s=START_S,
        **_settings(args),
    )


def _prompts(args: argparse.Namespace, method: Method) -> list[Prompt]:
    """Returns a prompt per request: text that repeats itself, or tokens drawn at random."""
    draw = random.Random(7)
    if method.layout:
        vocab = PRESETS["bench"].vocab
        return [
            [draw.randrange(FIRST_TOKEN, vocab) for _ in range(draw.randint(8, 64))]
            for _ in range(args.requests)
        ]
    found: list[Prompt] = []
    for _ in range(args.requests):
        names = draw.sample(_NAMES, 4)
        block = " ".join(f"{name} has {draw.choice(_THINGS)}." for name in names)
        found.append("\n".join([block] * 4) + "\n")
    return found


async def _measure(
    servers: Mapping[str, Server], prompts: Sequence[Prompt], args: argparse.Namespace
) -> dict[str, Found]:
    found = {key: Found() for key in servers}
    async with open_session() as session:
        for server in servers.values():
            await _answers(session, server, prompts, args.answer, "warm-up")
        before = {key: _drafts(server) for key, server in servers.items()}
        for turn in range(args.rounds):
            for key, server in servers.items():
                began = time.monotonic()
                answers = await _answers(session, server, prompts, args.answer, f"round {turn}")
                taken = time.monotonic() - began
                found[key].tokens_per_s.append(sum(map(len, answers)) / taken)
                found[key].answers += answers
        for key, server in servers.items():
            drafted, accepted = _drafts(server)
            found[key].drafted = drafted - before[key][0]
            found[key].accepted = accepted - before[key][1]
    return found


async def _answers(
    session: aiohttp.ClientSession,
    server: Server,
    prompts: Sequence[Prompt],
    tokens: int,
    salt: str,
) -> list[list[int]]:
    """Returns the tokens of all prompts, sent at once. salt: see :func:`afd_bench.workload.run`."""
    bodies: list[dict[str, object]] = [
        {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        for prompt in prompts
    ]
    choices = await asyncio.gather(*(post_completion(session, server.url, body) for body in bodies))
    found = []
    for choice in choices:
        ids = choice["token_ids"]
        assert isinstance(ids, list)
        found.append(ids)
    return found


def _drafts(server: Server) -> tuple[float, float]:
    """Returns the drafted and the accepted tokens since the start."""
    names = [f"vllm:spec_decode_num_{what}_tokens_total" for what in ("draft", "accepted")]
    totals = dict.fromkeys(names, 0.0)
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    return totals[names[0]], totals[names[1]]


def _records(
    found: Mapping[str, Found], args: argparse.Namespace, name: str, command: str
) -> list[Record]:
    """Rates are medians of the rounds."""
    ours, without, peer = found[OURS], found[WITHOUT], found[PEER]
    pairs = list(zip(ours.answers, without.answers, strict=True))
    match = sum(mine == other for mine, other in pairs) / len(pairs)
    form = "float32" if args.device == "cpu" else "bfloat16, graphs"
    case = f"{name}, {args.drafts} drafts, {args.requests} requests, {args.device} {form}"

    def record(metric: str, value: float, unit: str, whose: str, theirs: float) -> Record:
        return Record(
            bench="speculation",
            case=case,
            metric=metric,
            value=round(value, 4),
            unit=unit,
            peer=whose,
            peer_value=round(theirs, 4),
            ratio=round(value / theirs, 3) if theirs else 0.0,
            machine=machine(),
            command=command,
            date=today(),
        )

    return [
        record("tokens_per_s", ours.rate, "tokens/s", WITHOUT, without.rate),
        record("tokens_per_s", ours.rate, "tokens/s", PEER, peer.rate),
        record("accepted", ours.share, "fraction of drafts", PEER, peer.share),
        record("match", match, "fraction of requests", WITHOUT, 1.0),
    ]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=tuple(METHODS))
    parser.add_argument("--device", default="cpu", choices=tuple(DEVICES))
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens per request and step")
    parser.add_argument("--requests", type=int, default=8, help="at once")
    parser.add_argument("--answer", type=int, default=96, help="generated tokens per request")
    parser.add_argument("--rounds", type=int, default=3, help="turns per server")
    parser.add_argument("--depth", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument(
        "--models", type=Path, default=Path("models"), help="folder of checkpoints; made if missing"
    )
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)
