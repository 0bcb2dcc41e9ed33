"""Runs an FFN instance under PyTorch's profiler: `... TRACE --role-file FILE`.

SIGUSR1 starts the profiler and SIGUSR2 stops it, both in the thread of the loop. Once the profiler
runs, this creates a file with TRACE's name and the suffix .started. Do not send SIGUSR2 before:
stopping a profiler that has not started ends the instance. Another thread writes the trace, because
that takes seconds in which peers would wait.
"""

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
    profiler = profile(activities=activities)

    def start(_signum: int, _frame: FrameType | None) -> None:
        profiler.start()
        trace.with_suffix(".started").touch()

    writer = threading.Thread(target=lambda: profiler.export_chrome_trace(str(trace)))

    def stop(_signum: int, _frame: FrameType | None) -> None:
        profiler.stop()
        writer.start()

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, stop)
    return run_role(load_role(role_file), role_file)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[3])))
