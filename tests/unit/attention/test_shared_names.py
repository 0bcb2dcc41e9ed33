"""Shared memory of a process group that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOLDER = """
import os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from attention_worker.shared_names import start_tracker
(start_tracker if sys.argv[1] == "apart" else resource_tracker.ensure_running)()
pid = resource_tracker._resource_tracker._pid
while sys.argv[1] == "apart" and os.getsid(pid) != pid:
    time.sleep(0.01)
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("tracker", ["apart", "inside"])
def test_a_tracker_apart_removes_what_a_killed_group_left(tracker: str) -> None:
    words = [sys.executable, "-c", HOLDER, tracker]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    path = Path("/dev/shm", holder.stdout.readline().strip())
    assert path.is_file()
    os.killpg(holder.pid, signal.SIGKILL)
    holder.wait(10)
    if tracker == "inside":  # the negative control
        assert path.exists()
        path.unlink()
        return
    end = time.monotonic() + 10
    while path.exists():
        assert time.monotonic() < end, "it is still there"
        time.sleep(0.01)
    assert not holder.stdout.read()  # so the tracker has ended


def test_a_second_start_changes_nothing() -> None:
    words = [
        sys.executable,
        "-c",
        "from multiprocessing.resource_tracker import _resource_tracker as one\n"
        "from attention_worker.shared_names import start_tracker\n"
        "start_tracker(); pid = one._pid; start_tracker(); assert one._pid == pid",
    ]
    subprocess.run(words, check=True, timeout=30)
