"""multiprocessing's resource tracker, in a session of its own.

The tracker removes the names in /dev/shm of processes that ended without doing so. The supervisor
kills whole process groups. A tracker inside of such a group would die with it, and vLLM's queues
between engine and worker would stay, up to 240 MiB each. Imports no vLLM.
"""

from collections.abc import Sequence
from multiprocessing import resource_tracker, util

_spawn = util.spawnv_passfds


def start_tracker() -> None:
    """Starts the tracker of this process and of those that it will start, if there is none yet. It
    ends after the last of them."""
    before = util.spawnv_passfds
    util.__dict__["spawnv_passfds"] = _spawn_apart
    try:
        resource_tracker.ensure_running()
    finally:
        util.__dict__["spawnv_passfds"] = before


def _spawn_apart(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """arguments: the last one is what the process runs."""
    *first, code = arguments
    return _spawn(path, [*first, f"import os; os.setsid(); {code}"], descriptors)
