"""A fork that is kept to make vLLM's engine on a GPU.

vLLM's API server has threads of CUDA when it starts its engine, so a fork of it would be unsound,
and a new process imports for 20 seconds what its parent has imported. So a process that has
imported everything forks itself before it becomes the API server. The fork has no other thread and
no context of a GPU, and makes processes as the server of multiprocessing's method ``forkserver``.
"""

import contextlib
import logging
import os
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from attention_worker.forks import fork_can_use_gpu, unknown_threads

logger = logging.getLogger("afd.attention")


class _Engine(ForkServerProcess):
    """A process with the variables of the process that asked for it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._variables = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._variables)
        super().run()


class _Context(ForkServerContext):
    Process = _Engine


_kept: list[BaseContext] = []
_spawn = util.spawnv_passfds


def keep(folder: Path) -> None:
    """Forks this process, unless it has threads or its forks cannot use the GPU.

    folder: private to the user, for the fork's socket.
    """
    if (threads := unknown_threads()) or not fork_can_use_gpu():
        why = f"threads: {', '.join(threads)}" if threads else "no use of the GPU in a fork"
        logger.info("the engine will import vLLM again: %s", why)
        return
    resource_tracker.ensure_running()  # a new process, unlike the next one
    folder_before = tempfile.tempdir
    util.__dict__["spawnv_passfds"], tempfile.tempdir = _fork, str(folder)
    try:
        forkserver.ensure_running()
    finally:
        util.__dict__["spawnv_passfds"], tempfile.tempdir = _spawn, folder_before
    _kept.append(_Context())


def context() -> BaseContext | None:
    """Returns what makes processes from the kept fork; None: there is none."""
    return _kept[0] if _kept else None


def _fork(_executable: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """In place of a new Python process.

    Args:
        arguments: the last one is what the process runs.
        descriptors: the last one is the reading end of a pipe. Its writing end is the parent's: the
            process ends with those who have it.
    """
    if pid := os.fork():
        return pid
    try:
        # The engine may start new processes of its own, such as vLLM's workers.
        util.__dict__["spawnv_passfds"] = _spawn
        pipe = os.fstat(descriptors[-1])
        for number in [int(name) for name in os.listdir("/proc/self/fd")]:
            with contextlib.suppress(OSError):  # the descriptor of the folder itself
                if number != descriptors[-1] and os.path.samestat(os.fstat(number), pipe):
                    os.close(number)
        exec(arguments[-1], {})
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()  # nothing above this function would
    finally:
        os._exit(1)
