"""Runs an FFN instance under PyTorch's profiler: `... TRACE --role-file FILE`.

SIGUSR1 starts the profiler and SIGUSR2 stops it, both in the thread of the loop. Files with TRACE's
name say how far that is: suffix .signalled when the thread has the signal, .started once the
profiler runs. Do not send SIGUSR2 before: stopping a profiler that has not started ends the
instance. Another thread writes the trace, because that takes seconds in which peers would wait.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch.profiler import ProfilerActivity, profile

from afd.config.roles import load_role
from afd_launch.role import run_role


def main(trace: Path, role_file: Path) -> int:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        _attach(activities)
    profiler = profile(activities=activities)

    def start(_signum: int, _frame: FrameType | None) -> None:
        trace.with_suffix(".signalled").touch()
        profiler.start()
        trace.with_suffix(".started").touch()

    writer = threading.Thread(target=lambda: profiler.export_chrome_trace(str(trace)))

    def stop(_signum: int, _frame: FrameType | None) -> None:
        profiler.stop()
        writer.start()

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, stop)
    return run_role(load_role(role_file), role_file)


def _attach(activities: list[ProfilerActivity]) -> None:
    """Attaches CUPTI while no stream waits: doing so later may wait for an idle device."""
    os.environ["TEARDOWN_CUPTI"] = "0"  # it stays attached after the first profile
    with profile(activities=activities):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[3])))
