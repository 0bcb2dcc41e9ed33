"""Arguments of `afd simulate`. Imports only argparse, because every `afd` command imports it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `afd simulate` to a parser."""
    parser.add_argument(
        "spec",
        type=Path,
        metavar="SPEC",
        help="a YAML file; `afd plan --list` names the folder of ours",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="timeline for Perfetto, JSON")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    load = parser.add_argument_group(
        "load",
        "Requests instead of the load in the file, or changes of its requests. The names are those"
        " of vllm bench serve and vllm serve.",
    )
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests per second; inf sends all at once (default: inf)",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier"
        " (default: 1)",
    )
    load.add_argument("--num-prompts", type=int, metavar="N", help="requests (default: 1000)")
    load.add_argument(
        "--input-len", type=float, metavar="TOKENS", help="mean prompt tokens (default: 1024)"
    )
    load.add_argument(
        "--output-len", type=float, metavar="TOKENS", help="mean output tokens (default: 128)"
    )
    load.add_argument(
        "--range-ratio",
        type=float,
        metavar="R",
        help="lengths are uniform within 1 - R to 1 + R of their means (default: 0)",
    )
    load.add_argument(
        "--arrivals",
        type=Path,
        metavar="CSV",
        help="a trace with the columns arrival_s,prompt,output instead",
    )
    load.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests open at a time (default: any)"
    )
    load.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests in an attention instance's batch"
    )
    load.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="tokens per step and instance"
    )
    load.add_argument(
        "--kv-cache-tokens", type=int, metavar="N", help="KV cache of an attention instance, tokens"
    )
    load.add_argument(
        "--prefill",
        choices=("here", "elsewhere"),
        help="where prompts are processed: by the attention instances, or before they arrive",
    )
