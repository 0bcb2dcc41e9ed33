"""A process that waits to replace a dead FFN rank.

Most of the time that an FFN rank takes to come back is for imports. So one process per host has
imported everything and waits for the role file of a rank, which it then runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from afd.errors import AfdError
from afd_launch.process import Command, RoleProcess
from afd_launch.watchdog import Watchdog

NAME = "standby"
ARGV = (sys.executable, "-m", "afd_launch.standby")
READY = b"waiting to replace an FFN rank\n"
KILL_WAIT_S = 5.0
SETTLE_S = 60.0
"""A waiting process that ends sooner is not replaced by another one for that long."""


class Standby:
    """The waiting process of one supervisor, if there is one. Used on the supervisor's thread."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._waiting: RoleProcess | None = None
        self._imported = False
        self._not_before = 0.0

    def keep(self, command: Command) -> None:
        """Makes sure that a process waits for a role like this one."""
        now = time.monotonic()
        if self._waiting is not None and self._waiting.exit_code() is not None:
            self.close()
            self._not_before = now + SETTLE_S
        if self._waiting is None and now >= self._not_before:
            try:
                self._waiting = RoleProcess(replace(command, name=NAME, argv=ARGV), told=True)
            except OSError:  # such as no memory; a dead role is then started as others are
                self._not_before = now + SETTLE_S
                return
            self._imported = False
            self._watchdog.add(self._waiting.group)

    def is_ready(self) -> bool:
        """Whether the waiting process has imported everything."""
        if self._waiting is not None and not self._imported:
            with contextlib.suppress(BlockingIOError):
                self._imported = READY in os.read(self._waiting.output, 1 << 16)
        return self._waiting is not None and self._imported

    def take(self, command: Command) -> RoleProcess | None:
        """Returns the waiting process, which now runs the role; None if no process waits for it."""
        process = self._waiting
        if process is None or not command.replaced_at_once or process.command.env != command.env:
            return None
        if process.exit_code() is not None or not process.tell(command.argv[-1]):
            return None
        self._waiting = None
        process.command = command
        process.started = time.monotonic()
        return process

    def close(self) -> None:
        """Ends the waiting process."""
        process, self._waiting = self._waiting, None
        if process is not None:
            process.signal(signal.SIGKILL)
            end = time.monotonic() + KILL_WAIT_S
            while not process.gone() and time.monotonic() < end:
                time.sleep(0.01)
            process.close()
            self._watchdog.remove(process.group)


def main() -> int:
    """Waits for the path of a role file on standard input, then runs that FFN rank."""
    import ffn_worker.main  # noqa: F401  takes seconds
    from afd.config.roles import load_role
    from afd_launch.role import end_at_once, run_role
    from ffn_worker.moe.late_imports import import_all

    import_all()
    os.write(1, READY)
    file = sys.stdin.readline().strip()
    if not file:
        return 0
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        end_at_once(run_role(load_role(file), Path(file)))
    except AfdError as error:
        print(f"afd: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
