"""What stands against forking a process: threads, which the fork does not have."""

import contextlib
import os
from pathlib import Path

_HARMLESS = ("ZMQbg/", "jemalloc_bg_thd", "cuda")
"""How names of threads begin whose library bears a fork. ZeroMQ's locks belong to a context, and a
fork makes one of its own. jemalloc, which pyarrow loads, prepares itself for forks. CUDA's thread
is there before a process has a context; whether a fork may use the GPU is tried."""


def unknown_threads() -> list[str]:
    """Returns the names of the other threads of this process, without those that do no harm."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            name = (task / "comm").read_text().strip()
            if int(task.name) != os.getpid() and not name.startswith(_HARMLESS):
                found.append(name)
    return found
