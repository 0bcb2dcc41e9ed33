"""One role as a process group: it ends with this process, and it ends as a whole."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # opened here: a forked child must not take locks


@dataclass(frozen=True)
class Command:
    """How to start one role. name: "attention-0"; env: added to this process's environment.

    ends_all: exit status 0 ends the deployment (an operator shut the control plane down).
    stateless: the role holds no state of requests, so a stalled one is killed and restarted.
    holds_requests: the role is restarted only once it can no longer serve its requests.
    spare: the role is started only when an operator adds it. replaced_at_once: a process that has
    imported everything waits to take the role over (afd_launch.standby).
    descriptors: of this process, which the role inherits.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_all: bool = False
    stateless: bool = False
    holds_requests: bool = False
    spare: bool = False
    replaced_at_once: bool = False
    descriptors: tuple[int, ...] = ()


class RoleProcess:
    """A running role. Its pid is also the id of its process group and of its login session."""

    def __init__(self, command: Command, *, told: bool = False) -> None:
        """Starts the process. Raises OSError if the program cannot be run.

        told: it gets a pipe as its standard input, for :meth:`tell`.

        Call this on the main thread: the kernel delivers the parent-death signal when the
        *thread* that forked ends (prctl(2), PR_SET_PDEATHSIG).
        """
        parent = os.getpid()
        self.command = command
        self.started = time.monotonic()
        self._popen = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.PIPE if told else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=command.descriptors,
            start_new_session=True,  # the supervisor passes Ctrl-C on, in order
            preexec_fn=lambda: die_with(parent, signal.SIGTERM),
        )
        assert self._popen.stdout is not None
        self.output = self._popen.stdout.fileno()
        os.set_blocking(self.output, False)

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def group(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """Exit status of the leader, negative for a signal; None while it runs. Reaps it."""
        return self._popen.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the group, if any is left."""
        # The group id cannot be reused meanwhile: the group has members, or its leader is a zombie.
        if self._popen.returncode is None or group_members(self.group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, number)

    def ask_to_leave(self) -> None:
        """Sends SIGTERM to the leader only, which ends the others when their work is done."""
        if self.exit_code() is None:
            self._popen.terminate()

    def gone(self) -> bool:
        """True once the leader is reaped and its group has no other process."""
        return self.exit_code() is not None and not group_members(self.group)

    def tell(self, line: str) -> bool:
        """Writes a line to its standard input and closes that; False if it has ended."""
        assert self._popen.stdin is not None
        try:
            with self._popen.stdin as pipe:
                pipe.write(line.encode() + b"\n")
        except BrokenPipeError:
            return False
        return self.exit_code() is None

    def close(self) -> None:
        assert self._popen.stdout is not None
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
        self._popen.stdout.close()


def die_with(parent: int, number: int) -> None:
    """Makes the kernel send this process a signal when its parent ends. For ``preexec_fn``."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os.kill(os.getpid(), number)


def group_members(group: int) -> list[int]:
    """Returns the pids of a process group, without zombies, from /proc/PID/stat (proc(5))."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
        except OSError:  # the process ended meanwhile
            continue
        # "pid (comm) state ppid pgrp ..."; comm may itself hold spaces and parentheses
        state, _, pgrp = stat.rpartition(")")[2].split()[:3]
        if int(pgrp) == group and state not in "ZX":
            members.append(int(entry))
    return members


def describe_exit(code: int) -> str:
    """``exited with status 3`` or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
