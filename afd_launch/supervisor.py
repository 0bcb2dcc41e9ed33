"""Runs the roles of one deployment on this host: starts, restarts and stops their processes.

One thread runs one loop, which reads the output of the roles and polls their processes
(:mod:`afd_launch.role_table`). The caller (``afd_launch.serve``) says which commands to run, in
which order, and when a role is ready.
"""

from __future__ import annotations

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
from afd_launch.host_watch import HostWatch
from afd_launch.orders import NO_ORDERS, Orders
from afd_launch.process import Command, RoleProcess, describe_exit
from afd_launch.restarts import backoff_s, recent
from afd_launch.role_log import say, write_line
from afd_launch.role_table import KILL_WAIT_S, POLL_S, RoleTable, StartFailed
from afd_launch.stall_monitor import StallMonitor
from afd_launch.start_progress import StartProgress, waiting_for
from afd_launch.watchdog import Watchdog

BURY_S = 2.0  # Python's resource tracker needs time to free the semaphores of a dead role
STANDBY_S = 60.0
"""Longest wait for a process that imports what takes a role over."""
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
        watchdog: Watchdog,
        log_dir: Path | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
        stall_monitor: StallMonitor | None = None,
        leave_monitor: StallMonitor | None = None,
        leave_s: float = 60.0,
        orders: Orders = NO_ORDERS,
        hosts: HostWatch | None = None,
        out: TextIO | None = None,
    ) -> None:
        """
        Args:
            start_s: seconds until all roles must be ready. watchdog: ends the roles if this process
                is killed. on_stop: called before the roles are stopped, perhaps repeatedly.
                stall_monitor: finds stalled stateless roles, which are then killed and restarted;
                None: stalled roles are left alone. leave_monitor: the same for roles that hold
                requests and have left the deployment. leave_s: seconds that a role gets to leave
                when it is asked to. orders: what operators want. hosts: the other hosts;
                None: there are none.
        """
        self._stages = tuple(stages)
        self._commands = {c.name: c for stage in self._stages for c in stage.commands}
        self._awaited = awaited
        self._start_s = start_s
        self._restart = restart
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._stall_monitor = stall_monitor
        self._leave_monitor = leave_monitor
        self._leave_s = leave_s
        self._orders = orders
        self._hosts = hosts
        self._out = out or sys.stdout
        self._signals: list[int] = []
        self._table = RoleTable(watchdog, self._out, log_dir, lambda: len(self._signals) > 1)
        self._running = self._table.running
        self._deaths: dict[str, list[float]] = {}
        self._due: dict[str, tuple[float, Command]] = {}  # when to start it
        self._returning: set[str] = set()  # restarted, not ready yet
        self._away: set[str] = {c.name for c in self._commands.values() if c.spare}  # not wanted
        self._added: set[str] = set()  # started by an order, not ready yet
        self._given_up: set[str] = set()  # added, but they end whenever they are started
        self._leaving: dict[str, float] = {}  # asked to leave -> when to kill it
        self._leave_at: dict[str, float] = {}  # when to ask a role to leave
        self._kill_at: dict[str, float] = {}  # roles that were told to end

    def run(self) -> int:
        """Serves until a signal or a failure. Call it on the main thread.

        Returns the exit status: 0 after SIGTERM or an operator's shutdown, 130 after SIGINT, 1
        after a failure (already reported). All processes of the roles have ended when it returns.
        """
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        status = 0
        try:
            self._start_all()
            self._on_ready()
            self._watch()
        except _Stop:
            status = 130 if self._signals[0] == signal.SIGINT else 0
            self._say(f"{signal.Signals(self._signals[0]).name}: stopping (again to hurry)")
        except (_Failed, StartFailed, ConfigError) as err:
            status = 1
            if self._hosts is not None:
                self._hosts.failed(str(err))
            self._stop_all()  # before the error, so that the error is the last line
            write_line(f"afd: error: {err}", sys.stderr)
        finally:
            self._stop_all()
            self._table.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        if status != 1:
            self._say("stopped")
        return status

    # -- start-up

    def _start_all(self) -> None:
        progress = StartProgress(self._say)
        names: list[str] = []
        come = self._hosts is None
        for stage in self._stages:
            if not come and not stage.first:
                self._await_hosts(progress)
                come, progress = True, StartProgress(self._say)
            commands = [command for command in stage.commands if not command.spare]
            names += [command.name for command in commands]
            self._start_some(commands)
            if stage.awaited:
                self._await_stage(names, progress)

    def _start_some(self, commands: Sequence[Command]) -> None:
        """Starts roles, but not yet those that are to be forks of a process that still imports."""
        forked = [c for c in self._commands.values() if c.forked and not c.spare]
        self._table.standbys.keep(forked, busy=False)
        for command in commands:
            if command.forked and self._table.standbys.imports(command):
                self._due[command.name] = (0.0, command)
            else:
                self._table.start(command)

    def _await_hosts(self, progress: StartProgress) -> None:
        assert self._hosts is not None
        began = time.monotonic()
        while True:
            self._turn()
            for name in self._running:  # the control plane
                if (code := self._running[name].exit_code()) is not None:
                    raise _Failed(self._start_failure(name, code))
            now = time.monotonic()
            missing = self._hosts.check_start(now - began)
            if missing is None:
                return
            progress.remind(missing, now)

    def _await_stage(self, names: list[str], progress: StartProgress) -> None:
        while True:
            self._turn()
            due, self._due = self._due, {}
            self._start_some([command for _, command in due.values()])
            waits = dict.fromkeys(self._due, "to start")
            for name in [*self._running]:
                process = self._running[name]
                code = process.exit_code()
                if code is not None:
                    raise _Failed(self._start_failure(name, code))
                if name in names and (wait := self._awaited(name, process.group)) is not None:
                    waits[name] = wait
            if not waits:
                return
            now = time.monotonic()
            phases = self._table.phases() | {
                name: f"importing {'torch' if command.stateless else 'vLLM'}"
                for name, (_, command) in self._due.items()
            }
            progress.follow(phases, now)
            text = waiting_for(waits, phases)
            if self._hosts is not None and (away := self._hosts.check_start()):
                text += f"; {away}"
            if now - progress.began > self._start_s:
                late = next(iter(waits))
                raise _Failed(
                    f"not ready after {self._start_s:g} s (deadlines.start_s), waiting for {text}"
                    + (self._table.why(late) if late in self._running else "")
                )
            progress.remind(text, now)

    def _start_failure(self, name: str, code: int) -> str:
        """The role's own error sentence, else how it ended and which exception ended it."""
        if (reason := self._table.error_of(name)) is not None:
            return f"{name}: {reason}"
        return f"{name} {describe_exit(code)} during start-up{self._table.why(name)}"

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
                if code is not None and name in self._leaving:
                    self._let_go(process)
                elif code is not None:
                    self._bury(process, code, now)
                elif name in self._returning:
                    self._check_return(process, now)
            busy = bool(self._returning or self._due or self._leaving)
            self._table.standbys.keep(self._commands.values(), busy=busy)
            self._follow_orders(now)
            self._end_stalled(now)
            self._end_departed(now)
            if self._hosts is not None:
                self._hosts.follow()
            for name, (moment, command) in [*self._due.items()]:
                if now >= moment and not self._waits(command):
                    del self._due[name]
                    self._table.start(command)
                    self._returning.add(name)

    def _waits(self, command: Command) -> bool:
        """Whether a role that is due is not started yet."""
        return self._is_held(command) or self._table.standbys.imports(command)

    def _is_held(self, command: Command) -> bool:
        """Whether the role needs a host that is away: it would only fail until it is given up."""
        in_data_plane = command.stateless or command.holds_requests
        return in_data_plane and self._hosts is not None and self._hosts.holds_restarts

    def _bury(self, process: RoleProcess, code: int, now: float) -> None:
        """A role died while serving: ends the rest of its process group and plans its restart."""
        name = process.name
        self._kill_at.pop(name, None)
        self._table.end([process], BURY_S)
        deaths = self._deaths.setdefault(name, [])
        if name in self._returning:  # its start does not count towards window_s
            self._returning.discard(name)
            deaths[:] = [moment + now - deaths[-1] for moment in deaths]
        deaths.append(now)
        limit, window_s = self._restart.max_restarts, self._restart.window_s
        deaths[:] = recent(deaths, now, window_s)
        wait_s = backoff_s(deaths, now, limit, window_s)
        if wait_s is None:
            text = (
                f"{name} {describe_exit(code)}, more than restart.max_restarts = {limit} times"
                f" within {window_s:g} s{self._table.why(name)}"
            )
            if name not in self._added or not self._others_serve():
                raise _Failed(text)
            self._say(f"{text}; it is not started again until it is added again")
            self._added.discard(name)
            self._given_up.add(name)
            self._deaths.pop(name)
            self._orders.give_up(name)
            return
        when = f" in {wait_s:g} s" if wait_s else ""
        self._say(f"{name} {describe_exit(code)}; starting it again{when}")
        self._due[name] = (now + wait_s, process.command)

    def _check_return(self, process: RoleProcess, now: float) -> None:
        age_s = now - process.started
        if self._awaited(process.name, process.group) is None:
            self._returning.discard(process.name)
            what = "ready" if process.name in self._added else "back"
            self._added.discard(process.name)
            self._say(f"{process.name} is {what} after {age_s:.1f} s")
        elif age_s > self._start_s and not (
            process.name in self._kill_at or self._is_held(process.command)
        ):
            self._kill_at[process.name] = now + KILL_WAIT_S
            self._say(f"{process.name} is not ready {age_s:.0f} s after its restart; ending it")
            process.signal(signal.SIGKILL)  # the next turn handles it as a death

    def _end_stalled(self, now: float) -> None:
        """Kills stalled stateless roles: attention instances would wait for them for ever."""
        if self._stall_monitor is None:
            return
        served = self._running.keys() - self._returning - self._leaving.keys()
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
        ending = self._kill_at.keys() | self._leaving.keys()
        served = self._running.keys() - self._returning - ending
        names = sorted(name for name in served if self._running[name].command.holds_requests)
        for name in self._leave_monitor.stalled(names, now):
            self._say(
                f"{name} has left the deployment and refuses connections, but its process still"
                f" lives after {self._leave_monitor.return_s:g} s; ending it"
            )
            self._running[name].signal(signal.SIGTERM)
            self._kill_at[name] = now + KILL_WAIT_S

    # -- what operators want

    def _follow_orders(self, now: float) -> None:
        """Starts roles that operators added, and lets those leave that they want away."""
        for name, command in self._commands.items():
            process = self._running.get(name)
            wish = self._orders.wish(name, process.group if process is not None else 0)
            if process is None:
                self._follow_absent(command, wish, now)
            elif name in self._leaving:
                if now >= self._leaving[name]:
                    self._leaving[name] = now + KILL_WAIT_S
                    self._say(f"{name} has not left within {self._leave_s:g} s; killing it")
                    process.signal(signal.SIGKILL)
            elif wish == "away" or (wish == "leave" and self._may_leave(command, now)):
                self._say(f"{name} is asked to leave once its requests have finished")
                self._leaving[name] = now + self._leave_s
                process.ask_to_leave()

    def _may_leave(self, command: Command, now: float) -> bool:
        """False while a process starts that takes over: the one that waits may have older code."""
        if not command.standby:
            return True
        if command.name not in self._leave_at:
            self._table.standbys.renew(command)
            self._leave_at[command.name] = now + STANDBY_S
        return self._table.standbys.is_ready(command) or now >= self._leave_at[command.name]

    def _follow_absent(self, command: Command, wish: str | None, now: float) -> None:
        name = command.name
        if wish == "away":
            self._due.pop(name, None)
            self._given_up.discard(name)
            self._away.add(name)
        elif wish == "run" and name not in self._due.keys() | self._given_up:
            self._say(f"starting {name}")
            self._due[name] = (now, command)
            if command.holds_requests or name in self._away:
                self._away.discard(name)
                self._added.add(name)

    def _others_serve(self) -> bool:
        """Whether an instance runs and is ready, so that the deployment can do without another."""
        ready = self._running.keys() - self._returning
        return any(self._running[name].command.holds_requests for name in ready)

    def _let_go(self, process: RoleProcess) -> None:
        """A role that was asked to leave has ended. What follows is the operators' wish."""
        name = process.name
        for book in (self._leaving, self._leave_at, self._kill_at, self._deaths):
            book.pop(name, None)
        self._returning.discard(name)
        self._table.end([process], BURY_S)
        self._say(f"{name} has left")

    # -- stopping

    def _stop_all(self) -> None:
        self._on_stop()
        self._due.clear()
        for stage in reversed(self._stages):
            names = [command.name for command in stage.commands]
            self._table.end([self._running[n] for n in names if n in self._running], stage.stop_s)

    # -- one turn of the loop

    def _turn(self) -> None:
        self._table.pump(POLL_S)
        if self._signals:
            raise _Stop

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _say(self, message: str) -> None:
        say(message, self._out)
