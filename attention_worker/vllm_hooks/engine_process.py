"""Starts vLLM's engine as a fork of its API server, and the ranks of an instance as forks of the
engine: their parents have imported everything already.

On CPUs vLLM starts its processes anew (vllm/platforms/cpu.py: spawn), and each imports for eight
seconds what its parent has imported. A fork has only the thread that made it. It is sound while no
other thread of the parent can hold what the child needs: a lock, or a share of a parallel loop. So
:func:`_context` looks which threads run, and leaves the start to vLLM if it does not know them all.
"""

import contextlib
import logging
import os
import signal
import socket
import stat
import time
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from pathlib import Path

from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor

from attention_worker.forks import unknown_threads
from attention_worker.vllm_hooks import kept_fork

logger = logging.getLogger("afd.attention")

_NAMED_S = 0.5
"""A thread has its parent's name before it has its own; longest wait for that."""


def install() -> None:
    """Makes this process, an API server or an engine, fork its children where that is sound; on a
    GPU, the API server's are forks of the process that it was (kept_fork.py)."""
    utils.get_mp_context = _context
    multiproc_executor.get_mp_context = _context


class _Child(ForkProcess):
    def start(self) -> None:
        logger.info("%s starts as a fork of its parent", self.name)
        super().start()

    def run(self) -> None:
        signal.set_wakeup_fd(-1)  # else the parent's event loop handles the child's signals
        _close_listeners()
        super().run()


class _ForksOfThis(ForkContext):
    Process = _Child


def _context() -> BaseContext:
    kept = kept_fork.context()
    if kept is not None:
        return kept
    obstacle = _obstacle()
    if obstacle is None:
        return _ForksOfThis()
    logger.info("a child of this process imports vLLM again, because its parent %s", obstacle)
    theirs: BaseContext = get_mp_context()
    return theirs


def _obstacle() -> str | None:
    """Returns why this process must not be forked; None: it may."""
    end = time.monotonic() + _NAMED_S
    while threads := unknown_threads():
        if time.monotonic() > end:
            return f"has other threads: {', '.join(threads)}"
        time.sleep(0.01)
    mapped = Path("/proc/self/maps").read_text()
    for library in os.environ.get("LD_PRELOAD", "").split(":"):
        if library not in mapped:  # vLLM wants it in its engine (vllm/platforms/cpu.py)
            return f"has not loaded {library}"
    return None


def _close_listeners() -> None:
    """Closes the sockets on which the parent takes connections: they must end with it."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself
            number = int(entry)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens:
                os.close(number)
