"""Arguments of `afd plan`. Imports only argparse, because every `afd` command imports it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `afd plan` to a parser."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model that comes with afd (see --list), or a folder with a config.json",
    )
    parser.add_argument(
        "--list", action="store_true", help="print known models, accelerators and options, and exit"
    )
    request = parser.add_argument_group("request")
    request.add_argument(
        "--accelerators", metavar="A[,B]", help="accelerators that both pools may use"
    )
    request.add_argument("--attention", metavar="A[,B]", help="accelerators of the attention pool")
    request.add_argument("--ffn", metavar="A[,B]", help="accelerators of the FFN pool")
    request.add_argument(
        "--context",
        default="4096",
        metavar="TOKENS",
        help="tokens per request in flight: 32k, or 4k:0.7,32k:0.3, or p50=4k,p90=16k,p99=64k"
        " (default: %(default)s)",
    )
    request.add_argument(
        "--tpot",
        type=float,
        default=50.0,
        metavar="MS",
        help="limit of the time per output token, in ms (default: %(default)g)",
    )
    request.add_argument("--gpus", type=int, metavar="N", help="available GPUs")
    request.add_argument("--tokens-per-s", type=float, metavar="R", help="required output tokens/s")
    request.add_argument(
        "--precision",
        default="fp8",
        metavar="NAME",
        help="number formats: fp8 (experts and cache), fp8-bf16-cache, bf16, mxfp4 (experts), or"
        " all-fp8 with FP8 attention weights (default: %(default)s)",
    )
    request.add_argument(
        "--accepted",
        type=float,
        default=1.0,
        metavar="R",
        help="tokens gained per step with speculative decoding (default: %(default)g)",
    )
    request.add_argument("--draft-tokens", type=int, metavar="N", help="draft tokens per step")
    request.add_argument(
        "--depth", type=int, choices=(1, 2, 3), help="micro-batches (default: best of 1 to 3)"
    )
    request.add_argument(
        "--wire", choices=("exact", "fp8"), help="wire format (default: best of both)"
    )
    request.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="L",
        help="price this deployment instead of searching: 2A2F or 2A2Fx8-tp8 (x GPUs per instance),"
        " TP8, DP8+EP, TP2xDP4+EP8; give one of each kind to compare them",
    )
    request.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="sequences in flight in each --layout, whatever its TPOT",
    )
    request.add_argument(
        "--redundant-experts",
        type=int,
        metavar="N",
        help="copies of experts per expert group (default: best of 0 and 1)",
    )
    request.add_argument(
        "--routing",
        metavar="FILE",
        help="JSON file of measured expert loads, or even (default: loads of the demo model)",
    )
    request.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="measured stage times, which replace modelled ones (see afd bench stages)",
    )
    request.add_argument(
        "--efficiency",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change an assumption of the cost model, such as network=0.6 (repeatable; see --list)",
    )
    out = parser.add_argument_group("output files")
    out.add_argument("--json", type=Path, metavar="FILE", help="the plan as JSON")
    out.add_argument("--report", type=Path, metavar="FILE", help="plots, as .html or .png")
    out.add_argument("--emit", type=Path, metavar="FILE", help="a deployment file for afd serve")
    out.add_argument(
        "--simulate", type=Path, metavar="FILE", help="a file for afd simulate, with jitter"
    )
    out.add_argument(
        "--presets",
        action="store_true",
        help="rewrite the preset deployment files that come with afd, and exit",
    )
