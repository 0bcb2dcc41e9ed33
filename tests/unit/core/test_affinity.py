"""Binding to cores: existing threads, later threads, and cores that do not exist."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, threading
from afd.host.affinity import bind_process

end = threading.Event()
def start():
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    return thread
before = [start(), start()]
core = sorted(os.sched_getaffinity(0))[-1]
bind_process((core,), "attention.cpus")
after = start()
masks = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
assert len(masks) == 4 and all(mask == {core} for mask in masks), masks
bind_process((), "attention.cpus")
for cores in ((4095,), (core, 4095)):
    try:
        bind_process(cores, "attention.cpus")
    except Exception as error:
        print(type(error).__name__, error)
end.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_all_threads_are_bound() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    core = sorted(os.sched_getaffinity(0))[-1]
    sentence = (
        f"cannot run on cores 4095, because this process may use only {core}; change attention.cpus"
    )
    assert done.stdout.splitlines() == [f"ConfigError {sentence}"] * 2
