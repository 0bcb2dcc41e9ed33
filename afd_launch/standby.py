"""Processes that wait to replace dead FFN ranks and dead attention instances.

Most of the time that these take to come back is for imports. So one process per kind and host has
imported everything, and forks itself for each role that takes the place of a dead one. This module
is the supervisor's side; afd_launch.standby_process is the other one, for the processes
afd_launch.ffn_standby and afd_launch.attention_standby.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from afd_launch.process import (
    Child,
    Command,
    RoleProcess,
    adopt_orphans,
    describe_exit,
    environment_of,
)
from afd_launch.standby_process import GO, READY, Order
from afd_launch.watchdog import Watchdog

NAME = "standby"
FFN = (sys.executable, "-m", "afd_launch.ffn_standby")
ATTENTION = (sys.executable, "-m", "afd_launch.attention_standby")
KILL_WAIT_S = 5.0
SETTLE_S = 60.0
"""A waiting process that ends is not replaced by another one for that long."""
IMPORT_S = 60.0
"""A role that died waits for a process that imports, for that long: a start of its own takes longer
and would take the cores from it."""
ANSWER_S = 5.0
"""Seconds that a fork may take to say its pid."""
_TAIL = 4096


@dataclass
class _Waiting:
    """command: of a role like those that it can run. tail: the last bytes that it printed."""

    command: Command
    process: RoleProcess
    channel: socket.socket
    imported: bool = False
    tail: bytes = b""


class Standby:
    """The waiting process of one kind, if there is one. Used on the supervisor's thread."""

    def __init__(self, watchdog: Watchdog, say: Callable[[str], None] = lambda text: None) -> None:
        self._watchdog = watchdog
        self._say = say
        self._waiting: _Waiting | None = None
        self._not_before = 0.0

    def keep(self, command: Command, *, busy: bool = False) -> None:
        """Makes sure that a process waits for roles like this one. busy: not now, if none does."""
        now = time.monotonic()
        waiting = self._waiting
        if waiting is not None:
            self._read(waiting)
            if (code := waiting.process.exit_code()) is not None:
                last = waiting.tail.decode(errors="replace").strip().rpartition("\n")[2]
                self._say(
                    f"the process that waits to replace {command.name} {describe_exit(code)}"
                    f"{f': {last}' if last else ''}; another one waits in {SETTLE_S:g} s"
                )
                self.close()
                self._not_before = now + SETTLE_S
        elif now >= self._not_before and not busy:
            try:
                self._waiting = self._start(command)
            except OSError:  # such as no memory; a dead role is then started as others are
                self._not_before = now + SETTLE_S

    def is_ready(self) -> bool:
        """Whether the waiting process has imported everything."""
        waiting = self._waiting
        if waiting is not None and not waiting.imported:
            with contextlib.suppress(OSError):
                waiting.imported = waiting.channel.recv(64, socket.MSG_DONTWAIT) == READY
        return waiting is not None and waiting.imported

    def imports(self, command: Command) -> bool:
        """Whether a process is about to wait for this role."""
        waiting = self._waiting
        return (
            waiting is not None
            and waiting.command.env == command.env
            and not self.is_ready()
            and waiting.process.exit_code() is None
            and time.monotonic() - waiting.process.started < IMPORT_S
        )

    def take(self, command: Command) -> RoleProcess | None:
        """Returns a process that runs the role; None if no process waits for it.

        Blocks for some 20 ms, and at most for ``ANSWER_S``.
        """
        waiting = self._waiting
        if waiting is None or waiting.command.env != command.env or not self.is_ready():
            return None
        output, theirs = os.pipe()
        mine, answer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.settimeout(ANSWER_S)
        with mine:
            try:
                with answer:
                    order = Order(command.argv[-1], environment_of(command)).encode()
                    socket.send_fds(waiting.channel, [order], [theirs, answer.fileno()])
                pid = int(mine.recv(64) or b"0")  # nothing: it, or its fork, has ended
            except TimeoutError:
                pid = 0
                self.close()
            except OSError:
                pid = 0
            finally:
                os.close(theirs)
            if pid:
                with contextlib.suppress(OSError):  # it has ended, as its exit status tells
                    mine.send(GO)
        if not pid:
            os.close(output)
            return None
        if pid == waiting.process.group:  # it cannot be forked
            self._waiting = None
            waiting.channel.close()
            return waiting.process.becomes(command, output)
        return RoleProcess(command, Child(pid), output)

    def close(self) -> None:
        """Ends the waiting process."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            process = waiting.process
            process.signal(signal.SIGKILL)
            end = time.monotonic() + KILL_WAIT_S
            while not process.gone() and time.monotonic() < end:
                time.sleep(0.01)
            waiting.channel.close()
            process.close()
            self._watchdog.remove(process.group)

    def _start(self, command: Command) -> _Waiting:
        adopt_orphans(True)  # before it forks
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # numpy's library makes threads when it is loaded, and a process with threads is not forked.
        env = {**command.env, "OPENBLAS_NUM_THREADS": "1"}
        argv = (*command.standby, command.argv[-1])
        with theirs:
            try:
                process = RoleProcess.start(
                    replace(command, name=NAME, argv=argv, env=env), theirs.fileno()
                )
            except OSError:
                channel.close()
                raise
        self._watchdog.add(process.group)
        return _Waiting(command, process, channel)

    def _read(self, waiting: _Waiting) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(waiting.process.output, 1 << 16):
                waiting.tail = (waiting.tail + data)[-_TAIL:]


class Standbys:
    """The waiting processes of one supervisor: at most one for each kind of role."""

    def __init__(self, watchdog: Watchdog, say: Callable[[str], None] = lambda text: None) -> None:
        """say: tells the user that one has ended."""
        self._watchdog = watchdog
        self._say = say
        self._kinds: dict[tuple[str, ...], Standby] = {}

    def keep(self, commands: Iterable[Command], *, busy: bool) -> None:
        """Makes sure that a process waits for each kind of role.

        commands: all roles. busy: a role starts or leaves and needs the cores, so none begins to
        import now.
        """
        first: dict[tuple[str, ...], Command] = {}
        for command in commands:
            first.setdefault(command.standby, command)
        for kind, command in first.items():
            if kind:
                self._of(kind).keep(command, busy=busy)

    def renew(self, command: Command) -> None:
        """A new process waits for roles like this one, with the code that is installed now."""
        self._of(command.standby).close()
        self._of(command.standby).keep(command)

    def is_ready(self, command: Command) -> bool:
        """Whether a process that waits for this role has imported everything."""
        return self._of(command.standby).is_ready()

    def imports(self, command: Command) -> bool:
        """Whether a process is about to wait for this role."""
        return bool(command.standby) and self._of(command.standby).imports(command)

    def take(self, command: Command) -> RoleProcess | None:
        """Returns a process that runs the role; None if no process waits for it."""
        return self._of(command.standby).take(command) if command.standby else None

    def close(self) -> None:
        """Ends the waiting processes."""
        for standby in self._kinds.values():
            standby.close()
        adopt_orphans(False)

    def _of(self, kind: tuple[str, ...]) -> Standby:
        return self._kinds.setdefault(kind, Standby(self._watchdog, self._say))
