"""Real processes that die or stop: the server, a member, and a member stopped for a while."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from control_support import (
    FAST,
    KEYS,
    MEMBERS,
    control_client,
    control_server,
    dealer,
    eventually,
)

from afd.control import operator
from afd.control.client import ControlClient
from afd.control.messages import Members, Timing

SERVER = """
import sys
from afd.control.keys import CurveKeys
from afd_launch.control_role import run_control
from afd.control.messages import Timing
keys = CurveKeys.from_json('''{keys}''', source="test")
sys.exit(run_control(sys.argv[1], keys, members={members}, timing=Timing({timing}),
                     ready=lambda a: print(a, flush=True)))
"""
MEMBER = """
import sys, time
from afd.control.client import ControlClient
from afd.control.keys import CurveKeys
keys = CurveKeys.from_json(sys.argv[4], source="test").member("gateway-" + sys.argv[2])
client = ControlClient(sys.argv[1], keys, role="gateway", index=int(sys.argv[2]))
client.join(deadline_s=5)
print("joined", flush=True)
if sys.argv[3] == "stay":
    time.sleep(60)
"""


@contextmanager
def process(script: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a Python child that runs the script; always kills it at the end."""
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
    return SERVER.format(
        timing=f"{timing.interval_s}, {timing.timeout_s}", keys=KEYS.to_json(), members=MEMBERS
    )


def client(address: str, role: str, index: int) -> ControlClient:
    return control_client(address, role, index)


def test_restarted_server_gets_its_members_back(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    timing = Timing(interval_s=0.05, timeout_s=2.0)
    sizes: list[int] = []
    with client(address, "attention", 0) as attention, client(address, "ffn", 0) as ffn:
        with process(server_script(timing), address) as first:
            assert first_line(first) == address
            generations = [x.join(deadline_s=5) for x in (attention, ffn)]
            attention.set_state("ready")
            operator.set_depth(address, KEYS.operator, depth=2)
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
        silent = "attention-0: the control plane is silent"
        eventually(lambda: silent in caplog.text, 5)
        assert not attention.connected
        assert attention.members == before  # the data plane continues with the last snapshot
        assert caplog.text.count(silent) == 1
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
            assert min(sizes) == 2  # no snapshot ever showed a smaller deployment


def test_kill_9_is_noticed_before_the_timeout() -> None:
    # The timeout is too long for this test: only the process table shows the death in time.
    slow = Timing(interval_s=0.5, timeout_s=30.0)
    with (
        control_server(timing=slow) as server,
        process(MEMBER, server.address, "1", "stay", KEYS.to_json()) as member,
        client(server.address, "gateway", 0) as watcher,
    ):
        assert first_line(member) == "joined"
        watcher.join(deadline_s=5)
        assert len(watcher.members.members) == 2
        member.send_signal(signal.SIGKILL)  # not reaped, so it stays a zombie
        assert eventually(lambda: len(watcher.members.members) == 1, 10) < 10


def test_stopped_member_returns_with_a_new_generation() -> None:
    with (
        control_server() as server,
        process(MEMBER, server.address, "1", "stay", KEYS.to_json()) as member,
    ):
        assert first_line(member) == "joined"
        (old,) = server.members.members
        member.send_signal(signal.SIGSTOP)
        took = eventually(lambda: not server.members.members, 3)
        assert took > FAST.timeout_s / 2
        member.send_signal(signal.SIGCONT)
        eventually(lambda: server.members.members, 3)
        assert server.members.members[0].generation > old.generation


def test_sigterm_notifies_members_and_exits_with_0() -> None:
    with process(server_script(), "tcp://127.0.0.1:0") as server:
        address = first_line(server)
        with client(address, "gateway", 0) as member:
            changes: list[Members] = []
            member.join(deadline_s=5)
            member.on_change(changes.append)
            server.send_signal(signal.SIGTERM)
            assert server.wait(3) == 0
            eventually(lambda: changes, 1)
            assert not member.stopping  # only the control plane ended, not the deployment
            assert len(member.members.members) == 1


def test_operator_shutdown_ends_the_server_process() -> None:
    with process(server_script(), "tcp://127.0.0.1:0") as server:
        address = first_line(server)
        with client(address, "gateway", 0) as member:
            member.join(deadline_s=5)
            operator.shutdown(address, KEYS.operator)
            assert server.wait(3) == 0
            eventually(lambda: member.stopping, 1)


def test_a_member_may_exit_without_close() -> None:
    with (
        control_server() as server,
        process(MEMBER, server.address, "1", "go", KEYS.to_json()) as member,
    ):
        assert first_line(member) == "joined"
        assert member.wait(5) == 0
        eventually(lambda: not server.members.members, 2)


def test_close_does_nothing_in_a_forked_child() -> None:
    with control_server() as server:
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


def read_nothing_while_a_member_dies() -> None:
    server = control_server()
    with dealer(server.address, KEYS.member("attention-0")) as one:
        for _ in range(100):
            one.send(bytes(50_000))
        time.sleep(0.5)
    time.sleep(2.5)
    with server, control_client(server.address, "gateway", 0) as gateway:
        gateway.join(deadline_s=5)


def test_a_member_that_dies_with_messages_unread_does_not_end_a_busy_server() -> None:
    """libzmq ended the server's process while its heartbeats were on."""
    process = multiprocessing.get_context("spawn").Process(target=read_nothing_while_a_member_dies)
    process.start()
    process.join(60)
    assert process.exitcode == 0
