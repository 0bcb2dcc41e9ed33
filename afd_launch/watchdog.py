"""Cleans up after a supervisor, or a benchmark, that was killed with SIGKILL or failed.

A parent-death signal reaches only direct children, which may ignore it. The watchdog is a small
process that knows the process group of every role. When the pipe from the supervisor breaks, it
ends all groups and removes the private folder. It reads one command per line from stdin:
``+GROUP``, ``-GROUP`` or ``bye``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from afd_launch.process import group_members

DETACHED = "--detached"
GRACE_S = 3.0
REMOVE_S = 10.0
"""Seconds for which a folder is removed again if a process that still ends writes into it."""


class Watchdog:
    """The supervisor's end."""

    def __init__(self, run_dir: Path | None = None, *, detached: bool = False) -> None:
        """detached: it is no child of this process, for parents that somebody ends with all of
        their children. :meth:`close` then does not wait for it."""
        where = [] if run_dir is None else [str(run_dir)]
        self._popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "afd_launch.watchdog",
                *([DETACHED] if detached else []),
                *where,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    def add(self, group: int) -> None:
        self._tell(f"+{group}")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}")

    def close(self, *, clean: bool = True) -> None:
        """Ends the watchdog. clean: nothing is left; else it cleans up first."""
        if clean:
            self._tell("bye")
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(timeout=GRACE_S + REMOVE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        # If the watchdog was killed, only the parent-death signals remain.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._popen.stdin.write(line + "\n")


def end_groups(groups: set[int], grace_s: float) -> None:
    """Sends SIGTERM to every group, and SIGKILL after ``grace_s`` seconds."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        deadline = time.monotonic() + wait_s
        while any(group_members(group) for group in groups):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return


def remove(folder: str) -> None:
    """Removes a folder, for up to ``REMOVE_S`` seconds: a process may write into it meanwhile."""
    end = time.monotonic() + REMOVE_S
    while os.path.exists(folder) and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the pipe closes
    folders = [word for word in sys.argv[1:] if word != DETACHED]
    if len(folders) < len(sys.argv) - 1 and os.fork():
        return 0
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "bye":
            return 0
        if word.startswith("+"):
            groups.add(int(word[1:]))
        else:
            groups.discard(int(word[1:]))
    end_groups(groups, GRACE_S)
    for run_dir in folders:
        remove(run_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
