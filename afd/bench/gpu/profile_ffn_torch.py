"""An FFN instance under PyTorch's profiler: `... TRACE --role-file FILE`.

SIGUSR1 starts the profiler and SIGUSR2 ends it, both in the thread of the loop, between two of its
steps or in a wait of it. Once it runs there is a file of TRACE's name with the suffix .started: one
that is ended before ends the instance. The trace is written by another thread: that takes seconds,
for which peers would wait.
"""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch.profiler import ProfilerActivity, profile

from afd.launch.role import run_role
from afd.roles import load_role


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
