"""Cleans up after a supervisor, or a benchmark, that was itself killed with SIGKILL.

A parent-death signal reaches only direct children and may be ignored; this small process knows
every role's process group, and when the pipe to the supervisor breaks it ends them all and removes
the run directory, if there is one. Protocol on its stdin, one line each: ``+GROUP``, ``-GROUP``,
``bye``.
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

from afd.launch.process import group_members

GRACE_S = 3.0


class Watchdog:
    """The supervisor's end."""

    def __init__(self, run_dir: Path | None = None) -> None:
        where = [] if run_dir is None else [str(run_dir)]
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "afd.launch.watchdog", *where],
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

    def close(self) -> None:
        """Dismiss it: everything is already cleaned up."""
        self._tell("bye")
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        # where it was killed, parent-death signals are what remains
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._popen.stdin.write(line + "\n")


def end_groups(groups: set[int], grace_s: float) -> None:
    """SIGTERM to every group, SIGKILL to what is left after ``grace_s``."""
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


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the supervisor does
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
    for run_dir in sys.argv[1:]:
        shutil.rmtree(run_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
