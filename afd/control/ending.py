"""Ends the process of a member that cannot go on, so that its supervisor starts it again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from afd.control.client import ControlClient


def exit_now(reason: str) -> NoReturn:
    """Prints the reason and ends the process with status 1, without any cleanup."""
    print(f"afd: error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def exit_if_refused(control: ControlClient, end: Callable[[str], object] = exit_now) -> None:
    """Ends this process when the control plane refuses it after it has joined.

    It would stay up otherwise, without being a member, and nobody would start it again.

    Args:
        end: called with the reason, on the control client's thread or on this one.
    """

    def look() -> None:
        if control.refused is not None:
            end(control.refused)

    control.on_change(lambda _: look())
    look()  # it may have been refused before
