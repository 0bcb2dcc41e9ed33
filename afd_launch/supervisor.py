"""Runs the roles of one deployment on this host: starts, restarts and stops their processes.

One thread runs one loop, which reads the output of the roles and polls their processes. The caller
(``afd_launch.serve``) says which commands to run, in which order, and when a role is ready.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from afd.config.sections import Restart
from afd.errors import ConfigError
from afd.host.logs import RoleLog, say, write_line
from afd_launch.host_watch import HostWatch
from afd_launch.process import Command, RoleProcess, describe_exit
from afd_launch.restarts import backoff_s
from afd_launch.root_cause import RootCause
from afd_launch.stall_monitor import StallMonitor
from afd_launch.watchdog import Watchdog

POLL_S = 0.1
PROGRESS_S = 5.0
KILL_WAIT_S = 5.0
HURRY_S = 1.0
BURY_S = 2.0  # Python's resource tracker needs time to free the semaphores of a dead role
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Awaited = Callable[[str, int], str | None]
"""What a started role (name, process group) still has to do; None once it is ready."""


@dataclass(frozen=True)
class Stage:
    """Roles that start together. Stages start in order and stop in reverse order.

    stop_s: seconds between SIGTERM and SIGKILL. awaited: False if the next stage may start before
    these roles are ready. first: starts before the other hosts have come.
    """

    commands: tuple[Command, ...]
    stop_s: float
    awaited: bool = True
    first: bool = False


class _Failed(Exception):
    """The deployment cannot continue; the message is for the user."""


class _Stop(Exception):
    """A signal asked the supervisor to stop."""


class Supervisor:
    """Runs the processes of one deployment."""

    def __init__(
        self,
        stages: Sequence[Stage],
        awaited: Awaited,
        *,
        start_s: float,
        restart: Restart,
        run_dir: Path,
        log_dir: Path | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        stall_monitor: StallMonitor | None = None,
        leave_monitor: StallMonitor | None = None,
        hosts: HostWatch | None = None,
        out: TextIO | None = None,
    ) -> None:
        """
        Args:
            start_s: seconds until all roles must be ready. run_dir: the watchdog removes it if this
                process is killed. on_stop: called before the roles are stopped, perhaps
                repeatedly. stall_monitor: finds stalled stateless roles, which are then
                killed and restarted; None: stalled roles are left alone. leave_monitor: the same
                for roles that hold requests and have left the deployment. hosts: the other hosts;
                None: there are none.
        """
        self._stages = tuple(stages)
        self._awaited = awaited
        self._start_s = start_s
        self._restart = restart
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._stall_monitor = stall_monitor
        self._leave_monitor = leave_monitor
        self._hosts = hosts
        self._out = out or sys.stdout
        self._running: dict[str, RoleProcess] = {}
        self._logs: dict[str, RoleLog] = {}
        self._causes: dict[str, RootCause] = {}  # of the current start of each role
        self._deaths: dict[str, list[float]] = {}
        self._due: dict[str, tuple[float, Command]] = {}  # when to start it again
        self._returning: set[str] = set()  # restarted, not ready yet
        self._kill_at: dict[str, float] = {}  # roles that left and got SIGTERM
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []

    def run(self) -> int:
        """Serves until a signal or a failure. Call it on the main thread.

        Returns the exit status: 0 after SIGTERM or an operator's shutdown, 130 after SIGINT, 1
        after a failure (already reported). All processes of the roles and the watchdog have ended
        when it returns.
        """
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        watchdog = self._watchdog = Watchdog(self._run_dir)
        status = 0
        try:
            self._start_all()
            self._on_ready()
            self._watch()
        except _Stop:
            status = 130 if self._signals[0] == signal.SIGINT else 0
            self._say(f"{signal.Signals(self._signals[0]).name}: stopping (again to hurry)")
        except (_Failed, ConfigError) as err:
            status = 1
            if self._hosts is not None:
                self._hosts.failed(str(err))
            self._stop_all()  # before the error, so that the error is the last line
            write_line(f"afd: error: {err}", sys.stderr)
        finally:
            self._stop_all()
            watchdog.close()
            for log in self._logs.values():
                log.close()
            self._selector.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        if status != 1:
            self._say("stopped")
        return status

    # -- start-up

    def _start_all(self) -> None:
        began = time.monotonic()
        names: list[str] = []
        come = self._hosts is None
        for stage in self._stages:
            if not come and not stage.first:
                self._await_hosts()
                come, began = True, time.monotonic()
            for command in stage.commands:
                self._start(command)
                names.append(command.name)
            if stage.awaited:
                self._await_stage(names, began)

    def _await_hosts(self) -> None:
        assert self._hosts is not None
        began = shown = time.monotonic()
        while True:
            self._turn()
            for name in self._running:  # the control plane
                if (code := self._running[name].exit_code()) is not None:
                    self._drain_output(self._running[name])
                    raise _Failed(self._start_failure(name, code))
            now = time.monotonic()
            missing = self._hosts.check_start(now - began)
            if missing is None:
                return
            if now - shown > PROGRESS_S:
                shown = now
                self._say(f"waiting for {missing}: {now - began:.0f} s")

    def _await_stage(self, names: list[str], began: float) -> None:
        shown = time.monotonic()
        while True:
            self._turn()
            waits = {}
            for name in [*self._running]:
                process = self._running[name]
                code = process.exit_code()
                if code is not None:
                    self._drain_output(process)
                    raise _Failed(self._start_failure(name, code))
                if name in names and (wait := self._awaited(name, process.group)) is not None:
                    waits[name] = wait
            if not waits:
                return
            now = time.monotonic()
            text = "; ".join(f"{name} {wait}" for name, wait in waits.items())
            if self._hosts is not None and (away := self._hosts.check_start()):
                text += f"; {away}"
            if now - began > self._start_s:
                late = next(iter(waits))
                raise _Failed(
                    f"not ready after {self._start_s:g} s (deadlines.start_s), waiting for {text}"
                    + self._why(late)
                )
            if now - shown > PROGRESS_S:
                shown = now
                self._say(f"{now - began:.0f} s, waiting for {text}")

    def _start_failure(self, name: str, code: int) -> str:
        """The role's own error sentence, else how it ended and which exception ended it."""
        self._logs[name].flush()
        if (reason := self._logs[name].error) is not None:
            return f"{name}: {reason}"
        return f"{name} {describe_exit(code)} during start-up{self._why(name)}"

    def _why(self, name: str) -> str:
        """The exception that the role printed and where its log is; prints its last lines."""
        cause = self._causes[name].text
        self._show_tail(name)
        return f"{': ' + cause if cause else ''}{self._log_hint(name)}"

    def _show_tail(self, name: str) -> None:
        self._logs[name].flush()
        lines = self._logs[name].tail()
        if lines:
            self._say(f"last {len(lines)} lines of {name}:")
            for line in lines:
                write_line(f"    {line}", self._out)

    def _log_hint(self, name: str) -> str:
        path = self._logs[name].path
        return f"; see {path}" if path else "; see its last lines above"

    def _start(self, command: Command) -> None:
        try:
            process = RoleProcess(command)
        except OSError as err:
            program = command.argv[0]
            raise _Failed(f"cannot start {command.name} ({program}): {err.strerror}") from err
        self._watchdog.add(process.group)
        self._running[command.name] = process
        if command.name not in self._logs:
            self._logs[command.name] = RoleLog(command.name, out=self._out, directory=self._log_dir)
        self._causes[command.name] = RootCause()
        self._selector.register(process.output, selectors.EVENT_READ, process)

    # -- serving

    def _watch(self) -> None:
        while True:
            self._turn()
            now = time.monotonic()
            for name in [*self._running]:
                process = self._running[name]
                code = process.exit_code()
                if code == 0 and process.command.ends_all:
                    self._say(f"{name} was shut down: stopping")
                    return
                if code is not None:
                    self._bury(process, code, now)
                elif name in self._returning:
                    self._check_return(process, now)
            self._end_stalled(now)
            self._end_departed(now)
            if self._hosts is not None:
                self._hosts.follow()
            for name, (moment, command) in [*self._due.items()]:
                if now >= moment and not self._is_held(command):
                    del self._due[name]
                    self._start(command)
                    self._returning.add(name)

    def _is_held(self, command: Command) -> bool:
        """Whether the role needs a host that is away: it would only fail until it is given up."""
        in_data_plane = command.stateless or command.holds_requests
        return in_data_plane and self._hosts is not None and self._hosts.holds_restarts

    def _bury(self, process: RoleProcess, code: int, now: float) -> None:
        """A role died while serving: ends the rest of its process group and plans its restart."""
        name = process.name
        self._kill_at.pop(name, None)
        self._end([process], BURY_S)
        deaths = self._deaths.setdefault(name, [])
        if name in self._returning:  # its start does not count towards window_s
            self._returning.discard(name)
            last = deaths[-1]
            deaths[:] = [moment + now - last for moment in deaths]
        deaths.append(now)
        limit, window_s = self._restart.max_restarts, self._restart.window_s
        wait_s = backoff_s(deaths, now, limit, window_s)
        if wait_s is None:
            raise _Failed(
                f"{name} {describe_exit(code)}, more than restart.max_restarts = {limit} times"
                f" within {window_s:g} s{self._why(name)}"
            )
        self._say(f"{name} {describe_exit(code)}; starting it again in {wait_s:g} s")
        self._due[name] = (now + wait_s, process.command)

    def _check_return(self, process: RoleProcess, now: float) -> None:
        age_s = now - process.started
        if self._awaited(process.name, process.group) is None:
            self._returning.discard(process.name)
            self._say(f"{process.name} is back after {age_s:.1f} s")
        elif age_s > self._start_s and not self._is_held(process.command):
            self._say(f"{process.name} is not ready {age_s:.0f} s after its restart; ending it")
            process.signal(signal.SIGKILL)  # the next turn handles it as a death

    def _end_stalled(self, now: float) -> None:
        """Kills stalled stateless roles: attention instances would wait for them for ever."""
        if self._stall_monitor is None:
            return
        served = self._running.keys() - self._returning
        names = sorted(name for name in served if self._running[name].command.stateless)
        for name in self._stall_monitor.stalled(names, now):
            self._say(
                f"{name} is stalled: its process lives, but the control plane dropped it and it has"
                f" not registered again within {self._stall_monitor.return_s:g} s; killing it"
            )
            self._running[name].signal(signal.SIGKILL)  # the next turn handles it as a death

    def _end_departed(self, now: float) -> None:
        """Ends attention instances whose engine has ended but whose process waits for its clients.

        They get SIGTERM, and SIGKILL after ``KILL_WAIT_S``. The next turn handles the death.
        """
        if self._leave_monitor is None:
            return
        for name, moment in [*self._kill_at.items()]:
            if now >= moment:
                del self._kill_at[name]
                self._running[name].signal(signal.SIGKILL)
        served = self._running.keys() - self._returning - self._kill_at.keys()
        names = sorted(name for name in served if self._running[name].command.holds_requests)
        for name in self._leave_monitor.stalled(names, now):
            self._say(
                f"{name} has left the deployment and refuses connections, but its process still"
                f" lives after {self._leave_monitor.return_s:g} s; ending it"
            )
            self._running[name].signal(signal.SIGTERM)
            self._kill_at[name] = now + KILL_WAIT_S

    # -- stopping

    def _stop_all(self) -> None:
        self._on_stop()
        self._due.clear()
        for stage in reversed(self._stages):
            names = [command.name for command in stage.commands]
            self._end([self._running[n] for n in names if n in self._running], stage.stop_s)

    def _end(self, processes: list[RoleProcess], stop_s: float) -> None:
        """Ends whole process groups: SIGTERM, and after ``stop_s`` seconds SIGKILL."""
        for process in processes:
            process.signal(signal.SIGTERM if stop_s else signal.SIGKILL)
        deadline = time.monotonic() + (stop_s or KILL_WAIT_S)
        killed = not stop_s
        left = list(processes)
        while left:
            self._pump(POLL_S)
            left = [process for process in left if not process.gone()]
            now = time.monotonic()
            if len(self._signals) > 1 and not killed and deadline > now + HURRY_S:
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

    def _forget(self, process: RoleProcess) -> None:
        self._drain_output(process)
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.output)
        process.close()
        self._watchdog.remove(process.group)
        self._logs[process.name].flush()
        del self._running[process.name]

    # -- one turn of the loop

    def _turn(self) -> None:
        self._pump(POLL_S)
        if self._signals:
            raise _Stop

    def _pump(self, timeout_s: float) -> None:
        """Writes out what the roles printed; waits up to ``timeout_s`` for the first bytes."""
        began = time.monotonic()
        events = self._selector.select(timeout_s)
        for key, _ in events:
            self._drain_output(key.data)
        # A role that prints a lot must not make this loop spin.
        rest = min(timeout_s, 0.02) - (time.monotonic() - began)
        if rest > 0:
            time.sleep(rest)

    def _drain_output(self, process: RoleProcess) -> None:
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

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _say(self, message: str) -> None:
        say(message, self._out)
