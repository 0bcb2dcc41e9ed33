"""One role as a process group: it cannot outlive us, and once it is ended nothing of it stays."""

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
    """How to start one role. name: "attention-0"; env: additions to our own environment.

    ends_all: its exit with status 0 ends the deployment (an operator shut the control plane down).
    stateless: it keeps nothing of a request, so one that stands still is better ended and started
    anew than waited for.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_all: bool = False
    stateless: bool = False


class RoleProcess:
    """A running role. Its pid is also its process group and session."""

    def __init__(self, command: Command) -> None:
        """Start it. Raises OSError where the program cannot be run.

        Call this from the main thread: the kernel delivers the parent-death signal when the
        *thread* that forked ends (prctl(2), PR_SET_PDEATHSIG).
        """
        parent = os.getpid()
        self.command = command
        self.started = time.monotonic()
        self._popen = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # a terminal's Ctrl-C is ours to pass on, in order
            preexec_fn=lambda: _die_with(parent),
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
        """Send a signal to every process of the group; none left is fine."""
        # between poll and killpg a group of ours cannot be reused: it has members, or is a zombie
        if self._popen.returncode is None or group_members(self.group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, number)

    def gone(self) -> bool:
        """True once the leader is reaped and no other member of its group is left."""
        return self.exit_code() is not None and not group_members(self.group)

    def close(self) -> None:
        assert self._popen.stdout is not None
        self._popen.stdout.close()


def _die_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGTERM)


def group_members(group: int) -> list[int]:
    """Live (not zombie) processes of a process group, from /proc/PID/stat (proc(5))."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
        except OSError:  # it ended while we looked
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
