"""The processes of the roles that run now, and their output. Used on the supervisor's thread."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from afd_launch.process import Command, RoleProcess
from afd_launch.role_log import RoleLog, say, write_line
from afd_launch.root_cause import RootCause
from afd_launch.standby import Standbys
from afd_launch.watchdog import Watchdog

POLL_S = 0.1
KILL_WAIT_S = 5.0
HURRY_S = 1.0


class StartFailed(Exception):
    """A role could not be started; the message is for the user."""


class RoleTable:
    """Starts and ends processes, and passes on what they print.

    running: by name of the role. standbys: the processes that wait to take a role over.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        out: TextIO,
        log_dir: Path | None = None,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            watchdog: ends the processes if this one is killed. log_dir: one file per role in it;
                None: they go to ``out``. hurry: whether the user asked again to stop.
        """
        self.running: dict[str, RoleProcess] = {}
        self._watchdog = watchdog
        self._out = out
        self._log_dir = log_dir
        self._hurry = hurry
        self._logs: dict[str, RoleLog] = {}
        self._causes: dict[str, RootCause] = {}  # of the current start of each role
        self._selector = selectors.DefaultSelector()
        self.standbys = Standbys(watchdog, self._say)
        self._warned = False

    def start(self, command: Command) -> None:
        """Raises StartFailed."""
        try:
            process = self.standbys.take(command) or RoleProcess.start(command)
        except OSError as err:
            program = command.argv[0]
            raise StartFailed(f"cannot start {command.name} ({program}): {err.strerror}") from err
        self._watchdog.add(process.group)
        self.running[command.name] = process
        if command.name not in self._logs:
            self._logs[command.name] = RoleLog(
                command.name,
                out=self._out,
                directory=self._log_dir,
                on_loss=self._warn,
                phases=False,
            )
        self._logs[command.name].phase = ""
        self._causes[command.name] = RootCause()
        self._selector.register(process.output, selectors.EVENT_READ, process)

    def end(self, processes: Sequence[RoleProcess], stop_s: float) -> None:
        """Ends whole process groups: SIGTERM, and after ``stop_s`` seconds SIGKILL."""
        for process in processes:
            process.signal(signal.SIGTERM if stop_s else signal.SIGKILL)
        deadline = time.monotonic() + (stop_s or KILL_WAIT_S)
        killed = not stop_s
        left = list(processes)
        while left:
            self.pump(POLL_S)
            left = [process for process in left if not process.gone()]
            now = time.monotonic()
            if self._hurry() and not killed and deadline > now + HURRY_S:
                deadline = now + HURRY_S
                for process in left:  # a draining gateway stops at once on a second signal
                    process.signal(signal.SIGTERM)
            if not left or now < deadline:
                continue
            names = ", ".join(process.name for process in left)
            if killed:  # in uninterruptible sleep
                self._say(f"{names} cannot be killed; check its state with ps")
                break
            self._say(f"{names} did not end within its deadline; killing it")
            for process in left:
                process.signal(signal.SIGKILL)
            killed, deadline = True, now + KILL_WAIT_S
        for process in processes:
            self._forget(process)

    def pump(self, timeout_s: float) -> None:
        """Writes out what the roles printed; waits up to ``timeout_s`` for the first bytes."""
        began = time.monotonic()
        events = self._selector.select(timeout_s)
        for key, _ in events:
            self._drain(key.data)
        # A role that prints a lot must not make this loop spin.
        rest = min(timeout_s, 0.02) - (time.monotonic() - began)
        if rest > 0:
            time.sleep(rest)

    def phases(self) -> dict[str, str]:
        """Returns, by name, what each running role said last that it is doing; "" at first."""
        return {name: log.phase for name, log in self._logs.items() if name in self.running}

    def error_of(self, name: str) -> str | None:
        """The error sentence that the role printed last."""
        self._drain(self.running[name])
        self._logs[name].flush()
        return self._logs[name].error

    def why(self, name: str) -> str:
        """The exception that the role printed and where its log is; prints its last lines."""
        cause = self._causes[name].text
        log = self._logs[name]
        log.flush()
        lines = log.tail()
        if lines:
            self._say(f"last {len(lines)} lines of {name}:")
            for line in lines:
                write_line(f"    {line}", self._out)
        hint = f"; see {log.path}" if log.path else "; see its last lines above"
        return f"{': ' + cause if cause else ''}{hint}"

    def close(self) -> None:
        self.standbys.close()
        for log in self._logs.values():
            log.close()
        self._selector.close()

    def _drain(self, process: RoleProcess) -> None:
        while True:
            try:
                data = os.read(process.output, 64 * 1024)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(process.output)
                return
            self._logs[process.name].feed(data)
            self._causes[process.name].feed(data)
            if len(data) < 64 * 1024:
                return

    def _forget(self, process: RoleProcess) -> None:
        self._drain(process)
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.output)
        process.close()
        self._watchdog.remove(process.group)
        self._logs[process.name].flush()
        del self.running[process.name]

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"{reason}; serving goes on, and lines that cannot be written are lost")

    def _say(self, message: str) -> None:
        say(message, self._out)
