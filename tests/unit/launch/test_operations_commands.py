"""The `afd` commands of docs/operations.md exist, with the options that the page gives them."""

import re
import shlex
from pathlib import Path

import pytest

from afd_launch import cli

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
COMMANDS = re.findall(r"^\w*\$ afd (.*)$", PAGE.read_text(), re.MULTILINE)


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_one(command: str) -> None:
    args = cli._parser().parse_args(shlex.split(command))
    assert callable(args.run)
