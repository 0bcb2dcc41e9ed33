"""Python's garbage collector while a process starts."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_rests() -> Iterator[None]:
    """Runs no collection meanwhile, and none later of what was made meanwhile.

    For imports. What they make stays, and the collector would look at all of it again and again:
    1.9 of the 15 seconds in which vLLM is imported. It would also write to the pages that forks
    share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
