"""What stands against forking a process: threads, which the fork does not have, and a GPU."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_HARMLESS = ("ZMQbg/", "jemalloc_bg_thd", "cuda")
"""How names of threads begin whose library bears a fork. ZeroMQ's locks belong to a context, and a
fork makes one of its own. jemalloc, which pyarrow loads, prepares itself for forks. CUDA's thread
is there before a process has a context; see :func:`fork_can_use_gpu`."""
_TRIAL_S = 20.0


def unknown_threads() -> list[str]:
    """Returns the names of the other threads of this process, without those that do no harm."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            name = (task / "comm").read_text().strip()
            if int(task.name) != os.getpid() and not name.startswith(_HARMLESS):
                found.append(name)
    return found


def fork_can_use_gpu() -> bool:
    """Tries it. CUDA bears a fork of a process that has looked for GPUs, as imports of vLLM do, but
    not of one that has used them."""
    import torch  # late: not every caller needs a GPU

    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            torch.cuda.init()
            os._exit(0)
        os._exit(1)
    end = time.monotonic() + _TRIAL_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        if time.monotonic() > end:  # it waits for a lock of a thread that it does not have
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
