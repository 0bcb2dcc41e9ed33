"""`afd bench pd`: 1P 1A 1F beside 1A 1F, with float32 tokens.

Both deployments run one after the other on the same cores. The prefill instance is colocated vLLM,
and its KV caches go to the attention instance with NIXL.

- ttft_ms: time to the first token of a prompt of a length, which arrives while --streams requests
  decode.
- tpot_ms: time per token of these requests, while such prompts arrive one after the other.
- match: share of a mixed workload's requests whose tokens are those of the other deployment.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from afd.records import command_line, results_file, write_records
from afd_bench.prefill import Measured, Prompts, records, time_per_token, time_prompts
from afd_bench.servers import Server, disaggregated
from afd_bench.workload import Answer, matching, mixed, open_session, run
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve

PEER = "no disaggregation"
OURS = "1P1A1F"
VOCAB = 2000
_ANSWER = 64


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if not (args.model / "config.json").exists():
        sizes = resolve("qwen3_moe", "bench", max_positions=32_768)
        make_model("qwen3_moe", args.model, sizes)
    measured = {
        (length, metric): Measured(f"{length} tokens, {args.streams} streams", metric, "ms")
        for length in args.lengths
        for metric in ("ttft_ms", "tpot_ms")
    }
    answers: dict[str, list[Answer]] = {}
    for name, instances in ((PEER, 0), (OURS, 1)):
        print(f"starting {name}", flush=True)
        with disaggregated(_config(args, instances)) as server:
            answers[name] = run(server.url, server.model, mixed(3, vocab=VOCAB), salt="match")
            for length in args.lengths:
                first, each = asyncio.run(_measure(server, args, length))
                measured[length, "ttft_ms"].values[name] = first
                measured[length, "tpot_ms"].values[name] = each
    match = Measured("mixed workload", "match", "fraction of requests")
    match.values = {OURS: [matching(answers[OURS], answers[PEER])], PEER: [1.0]}
    made = records([*measured.values(), match], "pd", OURS, PEER, command_line("pd", argv).strip())
    for record in made:
        print(
            f"{record.case:28} {record.metric:8} {record.value:9.2f} {record.peer_value:9.2f}"
            f" {record.ratio:6.2f}"
        )
    if args.out is not None:
        write_records(args.out, made)
    return 0


def _config(args: argparse.Namespace, instances: int) -> dict[str, object]:
    attention = {
        "dtype": "float32",
        "max_model_len": max(*args.lengths, 512) + _ANSWER,
        "max_num_seqs": args.streams + 32,
        "max_num_batched_tokens": 1024,
        "kv_cache_gib": args.kv_gib,
    }
    prefill = {"instances": instances, "port": 0}
    return {
        "model": str(args.model.absolute()),
        "attention": attention,
        "prefill": prefill | ({"kv_cache_gib": args.kv_gib} if instances else {}),
    }


async def _measure(
    server: Server, args: argparse.Namespace, length: int
) -> tuple[list[float], list[float]]:
    """Returns times to the first token of prompts, and times per token beside them, ms."""
    prompts, firsts, each = Prompts(), [], []
    async with open_session() as session:
        await time_prompts(session, server, [prompts.draw(length)])  # warms up

        async def arrive() -> None:
            while True:
                taken = await time_prompts(session, server, [prompts.draw(length)])
                firsts.append(1e3 * taken)

        for _ in range(args.rounds):
            arriving = asyncio.create_task(arrive())
            streams = (
                time_per_token(session, server, prompts.draw(8), _ANSWER)
                for _ in range(args.streams)
            )
            each += [1e3 * taken for taken in await asyncio.gather(*streams)]
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)
    return firsts, each


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="afd bench pd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, default=Path("models/bench-long"), help="made if missing"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 1024], help="tokens of a prompt"
    )
    parser.add_argument("--streams", type=int, default=8, help="decoding requests")
    parser.add_argument("--rounds", type=int, default=2, help="times that they run")
    parser.add_argument("--kv-gib", type=float, default=0.5, help="KV cache of each server")
    parser.add_argument("--out", type=results_file, help="file of the records")
    return parser.parse_args(argv)
