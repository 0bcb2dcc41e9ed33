"""Asks vLLM's own parser about ``attention.vllm_args``. Importing vLLM takes seconds."""

import argparse
import contextlib
import io
from collections.abc import Sequence


def problem_with(arguments: Sequence[str]) -> str | None:
    """Returns what vLLM's API server would refuse in its command line; None: nothing."""
    # Imported late: only a check of a deployment with vllm_args needs it.
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _, unknown = parser.parse_known_args(list(arguments))
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2]
    return f"{unknown[0]} is no argument of vLLM's API server" if unknown else None
