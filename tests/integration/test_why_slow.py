"""`afd ctl why-slow` on a running deployment that is slowed on purpose, again and again.

2A2F over tcp, under load. Four faults of ffn-1, each switched on while the deployment runs: a
processor shared with busy processes, an expert call that sleeps, a relay that delays what it
receives, and routing that sends all rows to it.
"""

import contextlib
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from deployments import BLOCK, SETTINGS, Models
from helpers import environment, start_streams

from afd.control import operator
from afd.host.ports import held_ports
from afd.models import read_model
from afd_bench.servers import Server, disaggregated

pytestmark = [pytest.mark.serve, pytest.mark.long]

ROUNDS = 5
FAULTS = ("processor", "accelerator", "wire", "imbalance")
WATCHED_S = 3.0


@dataclass
class Relay:
    """Forwards TCP connections and holds each chunk back for ``delay_s`` on its way there."""

    port: int
    target: Path
    delay_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", int(self.target.read_text())))
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._there, args=(near, far), daemon=True).start()
            threading.Thread(target=self._back, args=(far, near), daemon=True).start()

    def _there(self, source: socket.socket, sink: socket.socket) -> None:
        chunks: queue.Queue[tuple[float, bytes]] = queue.Queue()

        def send() -> None:
            while True:
                due, data = chunks.get()
                time.sleep(max(0.0, due - time.monotonic()))
                with contextlib.suppress(OSError):
                    sink.sendall(data)
                if not data:
                    sink.close()
                    return

        threading.Thread(target=send, daemon=True).start()
        while True:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            chunks.put((time.monotonic() + self.delay_s, data))
            if not data:
                return

    def _back(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        sink.close()


@dataclass(frozen=True)
class Slowable:
    server: Server
    folder: Path
    relay: Relay
    pids: dict[str, int]

    @contextlib.contextmanager
    def fault(self, cause: str) -> Iterator[None]:
        """One fault of ffn-1 while the block runs."""
        file = self.folder / "fault"
        with contextlib.ExitStack() as stack:
            if cause == "processor":
                stack.enter_context(self._burners())
            elif cause == "accelerator":
                file.write_text("sleep ffn-1 0.01")
            elif cause == "imbalance":
                file.write_text("skew ffn-1 0")
            else:
                self.relay.delay_s = 0.02
            try:
                time.sleep(0.5)
                yield
            finally:
                file.write_text("")
                self.relay.delay_s = 0.0

    @contextlib.contextmanager
    def _burners(self) -> Iterator[None]:
        """Busy processes on a core that only ffn-1 may use besides them."""
        cores = sorted(os.sched_getaffinity(0))
        before = {m: _place(pid, cores[1:] or cores) for m, pid in self.pids.items()}
        _place(self.pids["ffn-1"], cores[:1])
        burn = [sys.executable, "-c", "while True: pass"]
        burners = [subprocess.Popen(burn) for _ in range(8)]
        try:
            for one in burners:
                psutil.Process(one.pid).cpu_affinity(cores[:1])
            yield
        finally:
            for one in burners:
                one.kill()
                one.wait()
            for member, cores_before in before.items():
                _place(self.pids[member], cores_before)


def _place(pid: int, cores: list[int]) -> list[int]:
    """Moves all threads of a process to ``cores``; returns the cores of its first thread."""
    before = sorted(os.sched_getaffinity(pid))
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), cores)
    return before


@pytest.fixture(scope="module")
def slowable(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slowable]:
    folder = tmp_path_factory.mktemp("slow")
    model = tiny_models("qwen3_moe")
    _, facts = read_model(model)
    attention = {**SETTINGS, "instances": 2, "max_num_batched_tokens": 64, "vllm_args": [BLOCK]}
    config: dict[str, object] = {
        "model": str(model),
        "attention": {**attention, "cpus": [[core] for core in _two_cores()]},
        "ffn": {"instances": 2, "cpus": [[core] for core in _two_cores()]},
        "pipeline": {"depth": 1},
        "transport": {"backend": "tcp"},
    }
    with held_ports(["127.0.0.1"]) as (port,), contextlib.ExitStack() as stack:
        relay = Relay(port, folder / "relay")
        relay.start()
        here = {
            "PYTHONPATH": str(Path(__file__).parent / "faults"),
            "AFD_TEST_FAULT": str(folder / "fault"),
            "AFD_TEST_RELAY": str(port),
            "AFD_TEST_RELAY_TO": str(folder / "relay"),
            "AFD_TEST_EXPERTS": str(facts.num_experts),
            "TMPDIR": str(folder),
            "XDG_RUNTIME_DIR": "",
        }
        stack.enter_context(environment(**here))
        server = stack.enter_context(disaggregated(config))
        found = operator.status(server.control).members
        pids = {m.id: m.pid for m in found if m.role in ("attention", "ffn")}
        yield Slowable(server, folder, relay, pids)


def _two_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    return [cores[0], cores[-1]]


def test_it_names_member_and_cause_every_time(slowable: Slowable) -> None:
    """20 of 20: five rounds of four faults, in an order that a seed determines."""
    draw = random.Random(26)
    wanted = [cause for cause in FAULTS for _ in range(ROUNDS)]
    draw.shuffle(wanted)
    streams = start_streams(slowable.server.url, 8, 900, name="slow")
    told = []
    for cause in wanted:
        if all(stream.finish or stream.error for stream in streams):
            streams = start_streams(slowable.server.url, 8, 900, name="slow")
            time.sleep(1)
        with slowable.fault(cause):
            ask = ("ctl", "--control", slowable.server.control, "why-slow")
            done = afd_beside(*ask, "--over", str(WATCHED_S))
        told.append((cause, done.splitlines()))
    wrong = [
        (cause, lines)
        for cause, lines in told
        if not (lines[0].startswith("ffn-1 ") and lines[1].startswith(f"cause: {cause};"))
    ]
    assert not wrong, wrong


def afd_beside(*argv: str) -> str:
    """Runs an afd command beside the deployment, without the faults."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-m", "afd_launch.cli", *argv]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    return done.stdout
