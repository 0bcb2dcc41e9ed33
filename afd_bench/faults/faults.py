"""The faults: what happens to a deployment, and which role it happens to.

A fault returns when what it does is over; the caller then waits until the deployment is whole.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from afd_bench.faults.subject import Subject

Act = Callable[[Subject, random.Random], None]


@dataclass(frozen=True)
class Fault:
    """name: as in the records. cuts: connections of clients break, who come back for the rest.
    stall_s: the longest pause of a stream that is wanted. renews: the role of which a process ends
    and is started again."""

    name: str
    act: Act
    stall_s: float
    cuts: bool = False
    renews: str = ""


def kill_ffn(subject: Subject, draw: random.Random) -> None:
    os.kill(subject.leaders()[_some(subject, "ffn", draw)].pid, signal.SIGKILL)


def kill_ffn_twice(subject: Subject, draw: random.Random) -> None:
    """The second time while it starts."""
    first = subject.leaders()[_some(subject, "ffn", draw)]
    first.kill()
    _await(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
    starting: list[psutil.Process] = []

    def starts() -> bool:
        starting[:] = subject.starting_ffn()
        return bool(starting)

    _await(starts)
    time.sleep(draw.uniform(0.0, 0.2))
    for process in starting:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _await(lambda: not subject.is_whole(), 2.0)  # it may have been ready already


def kill_engine(subject: Subject, draw: random.Random) -> None:
    os.kill(subject.member_pid(_some(subject, "attention", draw)), signal.SIGKILL)


def kill_api_server(subject: Subject, draw: random.Random) -> None:
    """With all processes that it started."""
    subject.signal_group(_some(subject, "attention", draw), signal.SIGKILL)


def term_attention(subject: Subject, draw: random.Random) -> None:
    """What an orchestrator does."""
    name = _some(subject, "attention", draw)
    leader = subject.leaders()[name]
    leader.terminate()
    _await(lambda: not leader.is_running() or leader.status() == psutil.STATUS_ZOMBIE, 120.0)


def kill_control(subject: Subject, draw: random.Random) -> None:
    os.kill(subject.leaders()["control-0"].pid, signal.SIGKILL)


def kill_gateway(subject: Subject, draw: random.Random) -> None:
    os.kill(subject.leaders()[_some(subject, "gateway", draw)].pid, signal.SIGKILL)


def stop(role: str, seconds: float) -> Act:
    def act(subject: Subject, draw: random.Random) -> None:
        with subject.stopped(_some(subject, role, draw)):
            time.sleep(seconds)

    return act


def restart_all(subject: Subject, draw: random.Random) -> None:
    subject.operate().restart_all()


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("kill -9 FFN", kill_ffn, 2.0, renews="ffn"),
        Fault("kill -9 FFN while it starts", kill_ffn_twice, 5.0, renews="ffn"),
        Fault("kill -9 attention engine", kill_engine, 15.0, renews="attention"),
        Fault("kill -9 attention API server", kill_api_server, 15.0, renews="attention"),
        Fault("SIGTERM attention", term_attention, 2.0, renews="attention"),
        Fault("kill -9 control plane", kill_control, 1.0),
        Fault("kill -9 gateway", kill_gateway, 2.0, cuts=True, renews="gateway"),
        *(
            Fault(f"SIGSTOP {name} {seconds:g} s", stop(role, seconds), seconds + 12.0)
            for name, role in (
                ("FFN", "ffn"),
                ("attention", "attention"),
                ("control plane", "control"),
                ("gateway", "gateway"),
            )
            for seconds in (1.0, 5.0, 15.0)
        ),
        Fault("rolling restart", restart_all, 2.0),
    )
}


def _some(subject: Subject, role: str, draw: random.Random) -> str:
    """One of the running members of a role."""
    return draw.choice(sorted(name for name in subject.leaders() if name.startswith(f"{role}-")))


def _await(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
