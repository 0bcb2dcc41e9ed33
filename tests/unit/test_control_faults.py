"""Real processes that die: the server, a member, and a member that only stood still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from control_support import CONTRACT, FAST, eventually

from afd.control import operator
from afd.control.client import ControlClient
from afd.control.messages import Members, Timing
from afd.control.server import ControlServer

SERVER = """
import sys
from afd.control.main import run_control
from afd.control.messages import Timing
sys.exit(run_control(sys.argv[1], timing=Timing({timing}), ready=lambda a: print(a, flush=True)))
"""
MEMBER = """
import sys, time
from afd.control.client import ControlClient
client = ControlClient(sys.argv[1], role="gateway", index=int(sys.argv[2]))
client.join(deadline_s=5)
print("joined", flush=True)
if sys.argv[3] == "stay":
    time.sleep(60)
"""


@contextmanager
def process(script: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python child that runs the script; killed in the end, whatever happens."""
    child = subprocess.Popen(
        [sys.executable, "-c", script, *args], stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def server_script(timing: Timing = FAST) -> str:
    return SERVER.format(timing=f"{timing.interval_s}, {timing.timeout_s}")


def client(address: str, role: str, index: int) -> ControlClient:
    contract = None if role == "gateway" else CONTRACT
    return ControlClient(address, role=role, index=index, contract=contract, timing=FAST)


def test_restarted_server_gets_its_members_back(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    timing = Timing(interval_s=0.05, timeout_s=1.0)
    sizes: list[int] = []
    with client(address, "attention", 0) as attention, client(address, "ffn", 0) as ffn:
        with process(server_script(timing), address) as first:
            assert first_line(first) == address
            generations = [x.join(deadline_s=5) for x in (attention, ffn)]
            attention.set_state("ready")
            operator.set_depth(address, depth=2)
            attention.wait_for(
                lambda x: (
                    len(x.members) == 2
                    and x.depth == 2
                    and len(x.of("attention", state="ready")) == 1
                ),
                deadline_s=2,
                what="ffn-0",
            )
            before = attention.members
            attention.on_change(lambda x: sizes.append(len(x.members)))
            first.send_signal(signal.SIGKILL)
            first.wait()
        ffn.set_state("ready")  # while there is no server
        eventually(lambda: not attention.connected, 3)
        assert attention.members == before  # the data plane goes on with what it knows
        assert caplog.text.count("attention-0: the control plane is silent") == 1
        with process(server_script(timing), address) as second:
            assert first_line(second) == address
            after = attention.wait_for(
                lambda x: x.version > before.version and bool(x.of("ffn", state="ready")),
                deadline_s=5,
                what="ffn-0 again",
            )
            assert [x.generation for x in (attention, ffn)] == generations
            assert [(x.id, x.state) for x in after.members] == [
                ("attention-0", "ready"),
                ("ffn-0", "ready"),
            ]
            assert after.depth == 2
            with client(address, "ffn", 1) as newcomer:
                assert newcomer.join(deadline_s=2) > max(generations)
            assert min(sizes) == 2  # at no time did anybody see a smaller deployment


def test_kill_9_is_noticed_before_the_timeout() -> None:
    slow = Timing(interval_s=0.5, timeout_s=30.0)  # only the process table can tell
    with (
        ControlServer("tcp://127.0.0.1:0", timing=slow) as server,
        process(MEMBER, server.address, "1", "stay") as member,
        client(server.address, "gateway", 0) as watcher,
    ):
        assert first_line(member) == "joined"
        watcher.join(deadline_s=5)
        assert len(watcher.members.members) == 2
        member.send_signal(signal.SIGKILL)  # nobody reaps it: it stays a zombie
        assert eventually(lambda: len(watcher.members.members) == 1, 10) < 10


def test_member_that_stood_still_comes_back_as_a_new_generation() -> None:
    with (
        ControlServer("tcp://127.0.0.1:0", timing=FAST) as server,
        process(MEMBER, server.address, "1", "stay") as member,
    ):
        assert first_line(member) == "joined"
        (old,) = server.members.members
        member.send_signal(signal.SIGSTOP)
        took = eventually(lambda: not server.members.members, 3)
        assert took > FAST.timeout_s / 2
        member.send_signal(signal.SIGCONT)
        eventually(lambda: server.members.members, 3)
        assert server.members.members[0].generation > old.generation


def test_sigterm_says_goodbye_and_exits_with_0() -> None:
    with process(server_script(), "tcp://127.0.0.1:0") as server:
        address = first_line(server)
        with client(address, "gateway", 0) as member:
            changes: list[Members] = []
            member.join(deadline_s=5)
            member.on_change(changes.append)
            server.send_signal(signal.SIGTERM)
            assert server.wait(3) == 0
            eventually(lambda: changes, 1)
            assert not member.stopping  # only the control plane went
            assert len(member.members.members) == 1


def test_operator_shutdown_ends_the_server_process() -> None:
    with process(server_script(), "tcp://127.0.0.1:0") as server:
        address = first_line(server)
        with client(address, "gateway", 0) as member:
            member.join(deadline_s=5)
            operator.shutdown(address)
            assert server.wait(3) == 0
            eventually(lambda: member.stopping, 1)


def test_a_member_may_exit_without_close() -> None:
    with (
        ControlServer("tcp://127.0.0.1:0", timing=FAST) as server,
        process(MEMBER, server.address, "1", "go") as member,
    ):
        assert first_line(member) == "joined"
        assert member.wait(5) == 0
        eventually(lambda: not server.members.members, 2)


def test_close_does_nothing_in_a_forked_child() -> None:
    with ControlServer("tcp://127.0.0.1:0", timing=FAST) as server:
        member = client(server.address, "gateway", 0)
        member.join(deadline_s=5)
        child = os.fork()
        if child == 0:
            member.close()
            os._exit(0)
        deadline = time.monotonic() + 3
        done = 0
        while not done and time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert done == child and os.waitstatus_to_exitcode(status) == 0
        assert member.connected and len(server.members.members) == 1
        member.close()
