"""When the API server forks its engine, and what the fork does not keep."""

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

pytest.importorskip("vllm")

from attention_worker.forks import unknown_threads
from attention_worker.vllm_hooks import engine_process
from attention_worker.vllm_hooks.engine_process import _ForksOfThis, _obstacle


@pytest.fixture
def thread() -> Iterator[None]:
    end = threading.Event()
    running = threading.Thread(target=end.wait)
    running.start()
    yield
    end.set()
    running.join()


def test_a_thread_is_an_obstacle(monkeypatch: pytest.MonkeyPatch, thread: None) -> None:
    monkeypatch.setattr(engine_process, "_NAMED_S", 0.0)
    assert (_obstacle() or "").startswith("has other threads: ")


def test_threads_of_zeromq_are_none() -> None:
    before = Counter(unknown_threads())  # those of other tests, which may end meanwhile
    with zmq.Context() as context, context.socket(zmq.PULL) as one:
        one.bind_to_random_port("tcp://127.0.0.1")
        end = time.monotonic() + 5  # a thread has its parent's name at first
        while Counter(unknown_threads()) - before and time.monotonic() < end:
            time.sleep(0.01)
        tasks = Path("/proc/self/task").iterdir()
        assert any((task / "comm").read_text().startswith("ZMQbg/") for task in tasks)
        assert not Counter(unknown_threads()) - before


def test_a_library_that_only_the_engine_would_load_is_an_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "unknown_threads", lambda: [])  # torch may have some here
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = next(line.split()[-1] for line in lines if ".so" in line)
    monkeypatch.setenv("LD_PRELOAD", loaded)
    assert _obstacle() is None
    monkeypatch.setenv("LD_PRELOAD", f"{loaded}:/lib/libother.so")
    assert _obstacle() == "has not loaded /lib/libother.so"


def test_the_fork_keeps_no_listener_and_no_event_loop() -> None:
    def child() -> None:
        kept = [server.fileno(), *pair]
        still_open = [number for number in kept if os.path.exists(f"/proc/self/fd/{number}")]
        os._exit(0 if (still_open, signal.set_wakeup_fd(-1)) == (pair, -1) else 1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        one, other = socket.socketpair()
        one.setblocking(False)
        pair = [one.fileno(), other.fileno()]
        before = signal.set_wakeup_fd(one.fileno())
        try:
            process = _ForksOfThis().Process(target=child)
            process.start()
            process.join(20)
        finally:
            signal.set_wakeup_fd(before)
        assert process.exitcode == 0
        socket.create_connection(server.getsockname(), timeout=5).close()
        one.close()
        other.close()
