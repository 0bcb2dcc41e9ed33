"""`afd eval FILE`: compares the accuracy of a deployment with colocated vLLM."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from afd_bench.eval.options import options_of
from afd_bench.eval.run import evaluate
from afd_launch.arguments import add_config, load_deployment


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a limit is exceeded, else 0. Raises ConfigError, AfdError."""
    parser = argparse.ArgumentParser(
        prog="afd eval", description="Compare a deployment's accuracy with colocated vLLM's."
    )
    add_config(parser)
    for name, metavar, what in (
        ("wire", "NAME,...", "wire formats (default: all)"),
        ("reduce", "NAME,...", "all-reduce formats of FFN ranks (default: all, if tp > 1)"),
        ("depth", "N,...", "micro-batches in flight (default: 1 to the file's depth)"),
        ("ffn", "N,...", "numbers of FFN instances (default: as in the file)"),
        ("tp", "N,...", "ranks of each FFN instance (default: as in the file)"),
        ("dtype", "NAME,...", "serving dtypes (default: as in the file)"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, help=what)
    parser.add_argument(
        "--text", type=Path, action="append", default=[], metavar="FILE",
        help="a held-out text, documents separated by lines of --- (repeatable; default:"
        " heldout*.txt in the model's folder)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder in which to write eval.json and eval.md"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="a Markdown page whose table to update"
    )
    parser.add_argument(
        "--quick", action="store_true", help="less text, and only the largest depth"
    )
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="servers that run at a time (default: 1)"
    )
    args = parser.parse_args(argv)
    deployment = load_deployment(args)
    return evaluate(deployment, options_of(args, deployment))
