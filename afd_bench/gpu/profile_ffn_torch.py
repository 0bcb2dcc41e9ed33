"""Runs an FFN instance under PyTorch's profiler: `... TRACE --role-file FILE`.

A thread starts the profiler when a file with TRACE's name and suffix .start appears, says so with
.started, stops it when .stop appears, and writes the trace. The loop takes no part. The profiler
sees the operators of its own thread only, but the calls of CUDA of all threads.
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from afd.config.roles import load_role
from afd_bench.gpu.profile import START, STARTED, STOP
from afd_launch.role import run_role
from ffn_worker.main import set_gpu_environment

_LOOK_S = 0.01


def main(trace: Path, role_file: Path) -> int:
    role = load_role(role_file)
    set_gpu_environment(role)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        _attach(activities)
    threading.Thread(
        target=record, args=(profile(activities=activities), trace), daemon=True
    ).start()
    return run_role(role, role_file)


def record(profiler: profile, trace: Path) -> None:
    """Runs the profiler from one file to the other; see the module."""
    _await(trace.with_suffix(START))
    profiler.start()
    trace.with_suffix(STARTED).touch()
    _await(trace.with_suffix(STOP))
    profiler.stop()
    profiler.export_chrome_trace(str(trace))


def _await(file: Path) -> None:
    while not file.exists():
        time.sleep(_LOOK_S)


def _attach(activities: list[ProfilerActivity]) -> None:
    """Attaches CUPTI while no stream waits: doing so later may wait for an idle device."""
    os.environ["TEARDOWN_CUPTI"] = "0"  # it stays attached after the first profile
    with profile(activities=activities):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[3])))
