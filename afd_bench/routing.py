"""`afd bench routing`: prompts that share beginnings, routed by prefix and by fewest requests.

Two gateways that differ in ``gateway.routing`` only are in front of the same two attention
instances and take turns with the same kind of requests. Every turn has beginnings of its own, so
nothing is cached at its start. Each request is one of ``--groups`` beginnings and an end of its
own, in random order. The KV cache of one instance holds about ``--fit`` of all groups.

The instances are stand-ins that keep the latest blocks of prompts and take 100 us per token of a
prompt that they do not have. With ``--served`` they are real: 2A1F on this host.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from afd.control.operator import status
from afd.errors import AfdError
from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench.gateway.caching import BLOCK_TOKENS, caching_instance
from afd_bench.gateway.clients import percentile
from afd_bench.servers import disaggregated
from afd_bench.workload import FIRST_TOKEN, open_session
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_gateway.listener import bind_listener
from afd_gateway.server import start_gateway
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Upstream

SIDES = ("fewest", "prefix")
VOCAB = 2000
_PREFILL_S, _TOKEN_S = 100e-6, 5e-3  # of a stand-in
_END = 24
_ANSWER = 12


@dataclass(frozen=True)
class Turn:
    """One run of one side. hits: share of the prompt tokens that came from the prefix cache."""

    side: str
    requests_per_s: float
    first_p50_ms: float
    first_p99_ms: float
    hits: float


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if args.served:
        with disaggregated(served_config(args)) as server:
            urls = [member.api_url for member in status(server.control).of("attention")]
            turns = asyncio.run(measure(urls, server.model, args))
    else:
        turns = asyncio.run(_measure_stand_ins(args))
    print(table(turns))
    if args.out is not None:
        found = list(records(turns, args, machine(), command_line("routing", argv), today()))
        write_records(args.out, found)
    return 0


def blocks_of(args: argparse.Namespace) -> int:
    """Returns the KV blocks of an instance."""
    return int(args.fit * args.groups * args.prefix / BLOCK_TOKENS) + 64


def served_config(args: argparse.Namespace) -> dict[str, object]:
    """Returns the deployment of ``--served``; makes its model if it is missing."""
    model: Path = args.model
    if not (model / "config.json").exists():
        make_model("qwen3_moe", model, resolve("qwen3_moe", "bench"))
    vllm = [f"--block-size={BLOCK_TOKENS}", f"--num-gpu-blocks-override={blocks_of(args)}"]
    attention = {
        "instances": 2,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "kv_cache_gib": 0.5,
        "vllm_args": vllm,
    }
    return {"model": str(model.absolute()), "attention": attention}


async def _measure_stand_ins(args: argparse.Namespace) -> list[Turn]:
    async with contextlib.AsyncExitStack() as stack:
        made = [
            caching_instance(blocks_of(args), prefill_s=_PREFILL_S, token_s=_TOKEN_S)
            for _ in range(2)
        ]
        urls = [await stack.enter_async_context(one) for one in made]
        return await measure(urls, "model", args)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--served", action="store_true", help="real instances")
    parser.add_argument("--model", type=Path, default=Path("models/bench"), help="with --served")
    parser.add_argument("--groups", type=int, default=12, help="different beginnings")
    parser.add_argument("--prefix", type=int, default=960, help="tokens of a beginning")
    parser.add_argument("--fit", type=float, default=0.6, help="share of the groups, see above")
    parser.add_argument("--requests", type=int, default=96, help="of a turn")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)


async def measure(urls: Sequence[str], model: str, args: argparse.Namespace) -> list[Turn]:
    """Returns the turns of both sides, in the order in which they ran. Raises AfdError."""
    turns = []
    async with contextlib.AsyncExitStack() as stack:
        gateways = {side: await stack.enter_async_context(_gateway(side, urls)) for side in SIDES}
        session = await stack.enter_async_context(open_session())
        for number in range(args.turns):
            for side in SIDES:
                prompts = _prompts(args, f"{number} {side}")
                before = await _cache_counts(session, urls)
                began = time.monotonic()
                firsts = await _run(session, gateways[side], model, prompts, args.at_once)
                seconds = time.monotonic() - began
                after = await _cache_counts(session, urls)
                asked, hit = (now - then for now, then in zip(after, before, strict=True))
                turn = Turn(
                    side,
                    len(prompts) / seconds,
                    1e3 * percentile(firsts, 0.5),
                    1e3 * percentile(firsts, 0.99),
                    hit / asked,
                )
                print(_row(turn), flush=True)
                turns.append(turn)
    return turns


@contextlib.asynccontextmanager
async def _gateway(side: str, urls: Sequence[str]) -> AsyncIterator[str]:
    upstreams = tuple(Upstream(f"attention-{i}", url, "", 1) for i, url in enumerate(urls))
    settings = GatewaySettings(attention_instances=len(urls), ffn_instances=0)
    settings = replace(settings, routing="prefix" if side == "prefix" else "fewest")
    server = await start_gateway(settings, lambda: upstreams, bind_listener("127.0.0.1", 0))
    try:
        while sum(view.eligible for view in server.gateway.pool.views()) < len(urls):
            await asyncio.sleep(0.05)
        yield server.url
    finally:
        await server.stop(0.0)


def _prompts(args: argparse.Namespace, seed: str) -> list[list[int]]:
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(FIRST_TOKEN, VOCAB) for _ in range(count)]

    beginnings = [tokens(args.prefix) for _ in range(args.groups)]
    return [draw.choice(beginnings) + tokens(_END) for _ in range(args.requests)]


async def _run(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    at_once: int,
) -> list[float]:
    """Returns the seconds to the first token of each request."""
    left = iter(prompts)
    firsts: list[float] = []

    async def client() -> None:
        for prompt in left:
            body = {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": _ANSWER,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            began, first = time.monotonic(), None
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                async for chunk in answer.content.iter_any():
                    if first is None:
                        first = time.monotonic() - began
                        firsts.append(first)
                    last = chunk
            if answer.status != 200 or first is None or b"[DONE]" not in last:
                raise AfdError(f"{url} did not complete a request; see its log")

    await asyncio.gather(*(client() for _ in range(at_once)))
    return firsts


async def _cache_counts(session: aiohttp.ClientSession, urls: Sequence[str]) -> tuple[float, float]:
    """Returns prompt tokens looked up in, and found in, the prefix caches of all instances."""
    totals = {"vllm:prefix_cache_queries_total": 0.0, "vllm:prefix_cache_hits_total": 0.0}
    for url in urls:
        async with session.get(f"{url}/metrics") as answer:
            for family in text_string_to_metric_families(await answer.text()):
                for sample in family.samples:
                    if sample.name in totals:
                        totals[sample.name] += sample.value
    asked, hit = totals.values()
    return asked, hit


def _row(turn: Turn) -> str:
    return (
        f"| {turn.side} | {turn.requests_per_s:.2f} | {turn.first_p50_ms:.0f} |"
        f" {turn.first_p99_ms:.0f} | {turn.hits:.3f} |"
    )


def medians(turns: Sequence[Turn]) -> dict[str, Turn]:
    """Returns the median of every number, by side."""

    def median(side: str, field: str) -> float:
        values: list[float] = [vars(turn)[field] for turn in turns if turn.side == side]
        return statistics.median(values)

    fields = ("requests_per_s", "first_p50_ms", "first_p99_ms", "hits")
    return {side: Turn(side, *(median(side, field) for field in fields)) for side in SIDES}


def table(turns: Sequence[Turn]) -> str:
    """Returns Markdown: the median of each side."""
    return "\n".join(
        [
            "",
            "| routing | requests/s | first token p50 ms | p99 | share of prompt tokens cached |",
            "|---|---|---|---|---|",
            *map(_row, medians(turns).values()),
        ]
    )


def records(
    turns: Sequence[Turn], args: argparse.Namespace, host: str, command: str, date: str
) -> Iterator[Record]:
    """Yields the numbers of routing by prefix beside routing by fewest requests."""
    found = medians(turns)
    ours, theirs = found["prefix"], found["fewest"]
    kind = "2A1F" if args.served else "2 stand-ins"
    sizes = f"{args.groups} beginnings of {args.prefix} tokens"
    case = f"{kind}, {sizes}, {args.at_once} requests at a time"
    for metric, unit, value, peer, more_is_better in (
        ("requests_per_s", "requests/s", ours.requests_per_s, theirs.requests_per_s, True),
        ("first_token_p50_ms", "ms", ours.first_p50_ms, theirs.first_p50_ms, False),
        ("first_token_p99_ms", "ms", ours.first_p99_ms, theirs.first_p99_ms, False),
        ("cached", "fraction of prompt tokens", ours.hits, theirs.hits, True),
    ):
        ratio = value / peer if more_is_better else peer / value
        yield Record(
            "routing", case, metric, round(value, 3), unit, "fewest", round(peer, 3),
            round(ratio, 3), host, command, date=date,
        )  # fmt: skip
