"""Asks vLLM itself about the command line of attention instances. Importing vLLM takes seconds."""

import argparse
import contextlib
import importlib
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence

from afd.config.roles import RoleSpec
from afd.errors import ConfigError
from attention_worker.vllm_hooks.command import attention_command
from attention_worker.vllm_hooks.versions import layout


def problem_with(arguments: Sequence[str]) -> str | None:
    """Returns what vLLM's API server would refuse in its command line; None: nothing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _, unknown = _parser().parse_known_args(list(arguments))
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2]
    return f"{unknown[0]} is no argument of vLLM's API server" if unknown else None


def refused(role: RoleSpec) -> str | None:
    """Returns why vLLM refuses to configure an attention instance, in one sentence; None: it does.

    vLLM makes its configuration from the whole command line, which checks lengths, dtype, attention
    backend and combinations. The model class is registered in this process, once. Nothing starts.

    Raises:
        ConfigError: as :func:`attention_command`, or attention instances do not support a setting.
    """
    argv, environment = attention_command(role)
    logger = logging.getLogger("vllm")
    level = logger.level
    with process_environment(environment):
        # Imported late: it imports vLLM.
        from vllm.engine.arg_utils import AsyncEngineArgs

        from attention_worker.vllm_hooks.register import register_model
        from attention_worker.vllm_hooks.support import check_supported

        options = _parser().parse_args(argv[3:])  # behind "python -m MODULE"
        logger.setLevel(logging.ERROR)  # the caller prints a report
        try:
            register_model(role)
            check_supported(AsyncEngineArgs.from_cli_args(options).create_engine_config())
        except ConfigError:
            raise
        except Exception as error:  # whatever a check of vLLM raises
            return _first_sentence(error)
        finally:
            logger.setLevel(level)
    return None


@contextlib.contextmanager
def process_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Adds to this process's environment, and restores all of it, with what vLLM sets there."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _parser() -> argparse.ArgumentParser:
    # Imported late: only a check needs it.
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = importlib.import_module(layout().arguments_module)
    parser: argparse.ArgumentParser = cli_args.make_arg_parser(FlexibleArgumentParser())
    return parser


def _first_sentence(error: Exception) -> str:
    """pydantic puts a title before vLLM's message, and its input and a link behind it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Value error, ")), "".join(lines[:1]))
    text = said.removeprefix("Value error, ").partition(" [type=")[0].partition(". ")[0]
    return text.rstrip(".") or type(error).__name__
