"""Asks vLLM's own parser about ``attention.vllm_args``. Importing vLLM takes seconds."""

import argparse
import contextlib
import importlib
import io
from collections.abc import Sequence

from attention_worker.vllm_hooks.versions import layout


def problem_with(arguments: Sequence[str]) -> str | None:
    """Returns what vLLM's API server would refuse in its command line; None: nothing."""
    # Imported late: only a check of a deployment with vllm_args needs it.
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = importlib.import_module(layout().arguments_module)
    parser: argparse.ArgumentParser = cli_args.make_arg_parser(FlexibleArgumentParser())
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _, unknown = parser.parse_known_args(list(arguments))
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2]
    return f"{unknown[0]} is no argument of vLLM's API server" if unknown else None
