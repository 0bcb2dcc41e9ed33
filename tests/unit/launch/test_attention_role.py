"""`afd attention` on SIGTERM: new requests are kept away, running ones finish, then vLLM ends.

A small HTTP server stands in for vLLM. It says how many requests it has, as our middleware does.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from control_support import CONTRACT, KEYS, control_client, control_server, eventually
from test_supervisor import alive, soon

from afd.config.deployment import Deployment
from afd.config.roles import RoleSpec
from afd.host.ports import held_ports
from attention_worker.running_requests import ENGINE_DIED, PATH, RunningRequests

# Says how many requests it has: the number in the file "requests". Notes when it gets SIGTERM.
VLLM = """
import http.server, os, signal, sys, time
here = sys.argv[1]
def on_term(*_):
    open(here + "/term", "w").close()
    os._exit(int(sys.argv[4]))
signal.signal(signal.SIGTERM, on_term)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == sys.argv[3]
        body = open(here + "/requests").read().encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
open(here + "/up", "w").write(str(os.getpid()))
server.serve_forever()
"""
LEADER = """
import json, logging, sys
from afd.config.roles import load_role
from afd_launch import attention_role
from afd_launch.attention_role import AttentionServer
attention_role.SETTLE_S, attention_role.POLL_S, attention_role._ASK_S = 0.3, 0.05, 0.3
logging.basicConfig(level=logging.INFO)
sys.exit(AttentionServer(load_role(sys.argv[1]), json.loads(sys.argv[2]), {}, own_session=False)
    .run())
"""


# Tells servers to end, each at another moment of its waiting.
TOLD = """
import random, signal, sys
from afd.config.roles import load_role
from afd_launch import attention_role
from afd_launch.attention_role import AttentionServer
attention_role.POLL_S = 0.00001
class Child:
    pid, status = 0, None
    def poll(self): return self.status
    def wait(self, timeout=None): return self.status
    def terminate(self): self.status = -signal.SIGTERM
spec = load_role(sys.argv[1])
def begin(_):
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.0002))
for _ in range(5000):
    server = AttentionServer(spec, [], {}, own_session=False)
    assert server.run(begin, Child()) == 0
"""


class Instance:
    """The process of `afd attention`, with the stand-in below it."""

    def __init__(
        self, here: Path, control: str, port: int, drain_s: float = 20.0, status: int = 0
    ) -> None:
        self.here = here
        self.set_requests(0)
        KEYS.member("attention-0").save(here / "keys")
        plan = {"model": "m", "deadlines": {"drain_s": drain_s}}
        spec = RoleSpec(
            "attention", 0, Deployment.from_plain(plan), control, here / "keys", api_port=port
        )
        spec.save(here / "role.json")
        argv = [sys.executable, "-S", "-c", VLLM, str(here), str(port), PATH, str(status)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEADER, str(here / "role.json"), json.dumps(argv)],
            start_new_session=True,
        )
        soon(lambda: (here / "up").exists() and (here / "up").read_text(), "it serves", 30)
        self.child = int((here / "up").read_text())

    def set_requests(self, count: int) -> None:
        fresh = self.here / "fresh"
        fresh.write_text(str(count))
        fresh.replace(self.here / "requests")

    @property
    def got_term(self) -> bool:
        return (self.here / "term").exists()


@pytest.fixture
def start(tmp_path):
    started = []
    with held_ports(["127.0.0.1"]) as (port,):

        def make(control: str, **options) -> Instance:
            started.append(Instance(tmp_path, control, port, **options))
            return started[-1]

        yield make
        for instance in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(instance.process.pid, signal.SIGKILL)
            instance.process.wait()


def test_sigterm_lets_running_requests_finish(start):
    with control_server(attention=1, contract=CONTRACT) as server:
        member = control_client(server.address, "attention", 0)
        member.join(deadline_s=5)
        instance = start(server.address)
        instance.set_requests(2)
        instance.process.send_signal(signal.SIGTERM)
        eventually(lambda: member.members.seat("attention-0").wish == "drain", 10)
        instance.process.send_signal(signal.SIGTERM)  # an orchestrator may repeat it
        time.sleep(0.6)
        assert not instance.got_term and alive(instance.child)
        instance.set_requests(0)
        assert instance.process.wait(10) == 0
        assert instance.got_term
        member.leave()
        member.close()


def test_without_a_control_plane_it_waits_for_its_requests_all_the_same(start):
    instance = start("tcp://127.0.0.1:9")
    instance.process.send_signal(signal.SIGTERM)
    assert instance.process.wait(15) == 0 and instance.got_term


def test_requests_that_do_not_finish_end_at_the_deadline(start):
    with control_server() as server:
        instance = start(server.address, drain_s=1.0)
        instance.set_requests(1)
        instance.process.send_signal(signal.SIGTERM)
        assert instance.process.wait(10) == 0 and instance.got_term


def test_sigterm_at_any_moment_is_heard(tmp_path):
    deployment = Deployment.from_plain({"model": "m"})
    spec = RoleSpec("attention", 0, deployment, "tcp://127.0.0.1:9", None, api_port=9)
    spec.save(tmp_path / "role.json")
    argv = [sys.executable, "-c", TOLD, str(tmp_path / "role.json")]
    subprocess.run(argv, check=True, timeout=60)


def test_a_second_ctrl_c_hurries(start):
    with control_server() as server:
        instance = start(server.address)
        instance.set_requests(1)
        instance.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert not instance.got_term
        instance.process.send_signal(signal.SIGINT)
        assert instance.process.wait(10) == 0 and instance.got_term


@pytest.mark.parametrize("status", [ENGINE_DIED, 1])
def test_an_engine_that_ends_before_its_api_server_is_no_failure(start, status):
    """vLLM's API server ends with 1 if the engine's process is a zombie when it reports it."""
    instance = start("tcp://127.0.0.1:9", status=status)
    instance.process.send_signal(signal.SIGTERM)
    assert instance.process.wait(15) == 0 and instance.got_term


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_it_ends_as_vllm_does(start, number):
    instance = start("tcp://127.0.0.1:9")
    os.kill(instance.child, number)
    assert instance.process.wait(10) == -number


def test_vllm_does_not_outlive_it(start):
    instance = start("tcp://127.0.0.1:9")
    instance.process.kill()
    soon(lambda: not alive(instance.child), "vLLM is gone")


def test_the_middleware_counts_requests_until_their_response_ends():
    began, finish = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        began.set()
        await finish.wait()
        if scope["path"] == "/fails":
            raise ValueError

    counting = RunningRequests(app)

    async def get(path, method="GET"):
        sent = []

        async def send(message):
            sent.append(message)

        await counting({"type": "http", "path": path, "method": method}, None, send)
        return sent

    async def number():
        start, body = await get(PATH)
        assert start["status"] == 200
        return int(body["body"])

    async def run():
        assert await number() == 0
        tasks = [
            asyncio.create_task(get(path, method))
            for path, method in (
                ("/v1/completions", "POST"),
                ("/fails", "POST"),
                ("/v1/chat/completions", "POST"),
                ("/health", "GET"),
            )
        ]
        await began.wait()
        await asyncio.sleep(0)
        assert await number() == 3
        tasks[2].cancel()  # the client is gone
        await asyncio.sleep(0.01)
        assert await number() == 2
        finish.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[1], ValueError)
        assert await number() == 0

    asyncio.run(run())
