"""Arguments of `afd plan`. argparse only, as they are read before anything is imported."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model of configs/models, or a path with a config.json",
    )
    asked = parser.add_argument_group("what to plan for")
    asked.add_argument("--accelerators", metavar="A[,B]", help="either pool may use any of these")
    asked.add_argument("--attention", metavar="A[,B]", help="accelerators of the attention pool")
    asked.add_argument("--ffn", metavar="A[,B]", help="accelerators of the FFN pool")
    asked.add_argument(
        "--context",
        default="4096",
        metavar="TOKENS",
        help="tokens per request in flight: 32k, or 4k:0.7,32k:0.3, or p50=4k,p90=16k,p99=64k",
    )
    asked.add_argument(
        "--tpot", type=float, default=50.0, metavar="MS", help="most ms per output token"
    )
    asked.add_argument("--gpus", type=int, metavar="N", help="GPUs at hand")
    asked.add_argument("--tokens-per-s", type=float, metavar="R", help="output tokens/s wanted")
    asked.add_argument(
        "--precision", default="fp8", metavar="NAME", help="fp8, fp8-bf16-attention, bf16, mxfp4"
    )
    asked.add_argument(
        "--accepted", type=float, default=1.0, metavar="R", help="tokens gained per step (MTP)"
    )
    asked.add_argument("--draft-tokens", type=int, metavar="N", help="draft tokens per step")
    asked.add_argument("--depth", type=int, choices=(1, 2, 3), help="fix the micro-batches")
    asked.add_argument("--wire", choices=("exact", "fp8"), help="fix the wire format")
    asked.add_argument(
        "--routing", metavar="FILE", help="expert loads (configs/routing), or the word even"
    )
    asked.add_argument(
        "--measured", type=Path, metavar="FILE", help="stage times to use where it has them"
    )
    asked.add_argument(
        "--efficiency",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change an assumption, such as network=0.6 (repeatable)",
    )
    out = parser.add_argument_group("output beside the table")
    out.add_argument("--json", type=Path, metavar="FILE", help="the plan as data")
    out.add_argument("--report", type=Path, metavar="FILE", help="plots: .html or .png")
    out.add_argument("--emit", type=Path, metavar="FILE", help="a deployment file for afd serve")
    out.add_argument(
        "--presets", action="store_true", help="write configs/topologies anew, and nothing else"
    )
