"""The event loop of a gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(work: Coroutine[None, None, T]) -> T:
    """Runs ``work`` like ``asyncio.run``, on uvloop if it is installed; vLLM installs it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
