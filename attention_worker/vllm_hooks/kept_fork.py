"""A fork that is kept to make vLLM's engine on a GPU, and one that makes the engine's worker.

vLLM's API server has threads of CUDA when it starts its engine, so a fork of it would be unsound,
and a new process imports for 20 seconds what its parent has imported. So a process that has
imported everything forks itself before it becomes the API server. The fork has no other thread and
no context of a GPU, and makes processes as the server of multiprocessing's method ``forkserver``.
The engine does the same before it has threads, for its worker.
"""

import contextlib
import logging
import os
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, util
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from attention_worker.forks import fork_can_use_gpu, unknown_threads
from attention_worker.shared_names import start_tracker

logger = logging.getLogger("afd.attention")


class _Child(ForkServerProcess):
    """A process with the variables of the process that asked for it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._variables = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._variables)
        super().run()


class _Engine(_Child):
    """It keeps a fork of its own, for its worker."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._folder = _kept[0].folder

    def run(self) -> None:
        _keep(_Kept(_WorkerContext(), self._folder))
        super().run()


class _EngineContext(ForkServerContext):
    Process = _Engine


class _WorkerContext(ForkServerContext):
    Process = _Child


@dataclass(frozen=True)
class _Kept:
    """context: makes processes from the fork. folder: see :func:`keep`."""

    context: BaseContext
    folder: Path


_kept: list[_Kept] = []
_spawn = util.spawnv_passfds


def keep(folder: Path, *, engine_keeps: bool) -> None:
    """Forks this process, unless it has threads or its forks cannot use the GPU.

    folder: private to the user, for the fork's socket. engine_keeps: the engine, which this process
    will start, keeps a fork for its worker.
    """
    if (threads := unknown_threads()) or not fork_can_use_gpu():
        why = f"threads: {', '.join(threads)}" if threads else "no use of the GPU in a fork"
        logger.info("the engine will import vLLM again: %s", why)
        return
    _keep(_Kept(_EngineContext() if engine_keeps else _WorkerContext(), folder))


def _keep(kept: _Kept) -> None:
    """Forks this process."""
    start_tracker()  # a new process, unlike the next one
    folder_before = tempfile.tempdir
    util.__dict__["spawnv_passfds"], tempfile.tempdir = _fork, str(kept.folder)
    try:
        forkserver.ensure_running()
    finally:
        util.__dict__["spawnv_passfds"], tempfile.tempdir = _spawn, folder_before
    _kept.append(kept)


def context() -> BaseContext | None:
    """Returns what makes processes from the kept fork; None: there is none."""
    return _kept[0].context if _kept else None


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
        # The engine starts processes of its own: new ones, and from a fork of its own. Its parent
        # forked with the lock of its forkserver held.
        util.__dict__["spawnv_passfds"] = _spawn
        forkserver.__dict__["_forkserver"].__init__()
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
