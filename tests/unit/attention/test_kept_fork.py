"""The fork that makes vLLM's engine on a GPU, and the engine's, which makes its worker.

Each case is a process without threads.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

pytest.importorskip("torch")

from attention_worker.vllm_hooks import kept_fork


def child(conn) -> None:
    conn.send((os.environ["SET_LATE"], threading.active_count(), sys.modules["marked"].mark))
    assert kept_fork.context() is not None
    sys.exit(7)


def sleeper() -> None:
    time.sleep(60)


def worker(conn, lock) -> None:
    with lock:
        conn.send((os.environ["SET_LATER"], threading.active_count(), kept_fork.context()))


def engine(conn) -> None:
    """An engine's worker is made from a fork of the engine without its threads, or is new."""
    ended = threading.Event()
    threading.Thread(target=ended.wait, daemon=True).start()
    os.environ["SET_LATER"] = "by the engine"
    context = kept_fork.context()
    assert context is not None
    ours, theirs = context.Pipe()
    # As vLLM starts its worker (vllm/v1/executor/multiproc_executor.py).
    lock = context.Lock()
    process = context.Process(target=worker, args=(theirs, lock), daemon=True)
    process.start()
    found = ours.recv()
    assert wait([process.sentinel], 10)
    process.join(10)
    new = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    new.start()
    new.join(30)
    conn.send((found, process.exitcode, new.exitcode))


def made(folder: Path) -> None:
    """A process with threads has processes made from the fork of the one that it was."""
    sys.modules["marked"] = type(sys)("marked")
    sys.modules["marked"].mark = "imported before"
    kept_fork.keep(folder, engine_keeps=True)
    context = kept_fork.context()
    assert context is not None
    ended = threading.Event()
    threading.Thread(target=ended.wait).start()
    os.environ["SET_LATE"] = "seen"
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,), name="engine")
    process.start()
    assert ours.recv() == ("seen", 1, "imported before")
    process.join(10)
    assert process.exitcode == 7
    process = context.Process(target=engine, args=(theirs,))
    process.start()
    assert ours.recv() == (("by the engine", 1, None), 0, 0)
    process.join(10)
    killed = context.Process(target=sleeper)
    killed.start()
    assert os.getpgid(killed.pid) == os.getpgid(0)  # the supervisor ends the group
    killed.kill()
    killed.join(10)
    assert killed.exitcode == -9
    ended.set()  # the fork then ends too, or the test would wait for its output


def not_made(folder: Path) -> None:
    ended = threading.Event()
    threading.Thread(target=ended.wait, daemon=True).start()
    kept_fork.keep(folder, engine_keeps=True)
    assert kept_fork.context() is None


def no_gpu(folder: Path) -> None:
    kept_fork.fork_can_use_gpu = lambda: False
    kept_fork.keep(folder, engine_keeps=True)
    assert kept_fork.context() is None


@pytest.mark.parametrize("case", [made, not_made, no_gpu], ids=lambda case: case.__name__)
def test_the_fork(case, tmp_path: Path) -> None:
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    words = [sys.executable, __file__, case.__name__, str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(elsewhere), "OMP_NUM_THREADS": "1"}
    environment |= {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not list(elsewhere.iterdir())


if __name__ == "__main__":
    if sys.argv[1] != "no_gpu":
        kept_fork.fork_can_use_gpu = lambda: True
    assert tempfile.gettempdir()
    globals()[sys.argv[1]](Path(sys.argv[2]))
