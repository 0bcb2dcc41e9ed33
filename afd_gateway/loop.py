"""The event loop of a gateway process."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(work: Coroutine[None, None, T]) -> T:
    """Runs ``work`` like ``asyncio.run``, on uvloop if it is installed; vLLM installs it.

    Garbage collections become rare: requests leave no reference cycles, and looking at all objects
    of 1,500 streams takes 0.13 s, in which no stream gets a token.
    """
    gc.freeze()
    gc.set_threshold(20_000, 100, 100)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
