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

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)  # opened here: a forked child must not take locks

_POLL_S = 0.01
_UNKNOWN = 255


@dataclass(frozen=True)
class Command:
    """How to start one role. name: "attention-0"; env: added to this process's environment.

    ends_all: exit status 0 ends the deployment (an operator shut the control plane down).
    stateless: the role holds no state of requests, so a stalled one is killed and restarted.
    holds_requests: the role is restarted only once it can no longer serve its requests.
    spare: the role is started only when an operator adds it. standby: how to start the process that
    has imported everything and waits to take the role over (afd_launch.standby); (): none waits.
    forked: its first start is a fork of that process, too. descriptors: of this process, which the
    role inherits.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_all: bool = False
    stateless: bool = False
    holds_requests: bool = False
    spare: bool = False
    standby: tuple[str, ...] = ()
    forked: bool = False
    descriptors: tuple[int, ...] = ()


class Child:
    """A child of this process that ``subprocess`` did not start. It has what is used of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs. Reaps it."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored: the kernel has reaped it
                self.returncode = _UNKNOWN
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


Started = subprocess.Popen[bytes] | Child


class RoleProcess:
    """A running role. Its pid is also the id of its process group and of its login session."""

    def __init__(self, command: Command, process: Started, output: int) -> None:
        """output: the end for reading of a pipe, its standard output and error. It is closed by
        :meth:`close`."""
        self.command = command
        self.started = time.monotonic()
        self.output = output
        self._process = process
        os.set_blocking(output, False)

    @classmethod
    def start(cls, command: Command, stdin: int = subprocess.DEVNULL) -> RoleProcess:
        """Starts the process. Raises OSError if the program cannot be run.

        Call this on the main thread: the kernel delivers the parent-death signal when the
        *thread* that forked ends (prctl(2), PR_SET_PDEATHSIG).
        """
        parent = os.getpid()
        output, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                command.argv,
                env=environment_of(command),
                stdin=stdin,
                stdout=theirs,
                stderr=subprocess.STDOUT,
                pass_fds=command.descriptors,
                start_new_session=True,  # the supervisor passes Ctrl-C on, in order
                preexec_fn=lambda: die_with(parent, signal.SIGTERM),
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(theirs)
        return cls(command, process, output)

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def group(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Exit status of the leader, negative for a signal; None while it runs. Reaps it."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the group, if any is left."""
        # The group id cannot be reused meanwhile: the group has members, or its leader is a zombie.
        if self._process.returncode is None or group_members(self.group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, number)

    def ask_to_leave(self) -> None:
        """Sends SIGTERM to the leader only, which ends the others when their work is done."""
        if self.exit_code() is None:
            self._process.terminate()

    def gone(self) -> bool:
        """True once the leader is reaped and its group has no other process."""
        return self.exit_code() is not None and not group_members(self.group)

    def becomes(self, command: Command, output: int) -> RoleProcess:
        """Returns the process as that of another role, which prints to another pipe."""
        os.close(self.output)
        return RoleProcess(command, self._process, output)

    def close(self) -> None:
        os.close(self.output)
        if self._process.returncode is not None:
            reap_group(self.group)


def environment_of(command: Command) -> dict[str, str]:
    """Returns the variables that a role is started with."""
    return {**os.environ, **command.env}


def adopt_orphans(wanted: bool) -> None:
    """Makes this process the parent of descendants whose parent ends (prctl(2),
    PR_SET_CHILD_SUBREAPER), or makes it that no longer."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def reap_group(group: int) -> None:
    """Reaps the ended children of this process in a process group: those that it has adopted."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


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
            # Not a Path: it interns each pid, and the table of such strings grows by 1 MiB.
            with open(f"/proc/{entry}/stat", errors="replace") as file:
                stat = file.read()
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
