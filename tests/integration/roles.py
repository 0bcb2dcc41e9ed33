"""Runs ``afd`` commands one by one, as a deployment on several hosts is started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from helpers import environment, processes_of, wait_until

AFD = (sys.executable, "-m", "afd_launch.cli")


@dataclass(frozen=True)
class Ended:
    """A command that has ended. errors: its "afd: error: ..." lines, without that prefix."""

    status: int
    seconds: float
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        mark = "afd: error: "
        return [
            line.split(mark, 1)[1] for line in (self.out + self.err).splitlines() if mark in line
        ]

    def error(self) -> str:
        """Returns the single error line; fails if the command succeeded or printed several."""
        assert self.status != 0, f"the command did not fail: {self.out}"
        assert len(self.errors) == 1, f"{len(self.errors)} error lines:\n{self.out}{self.err}"
        return self.errors[0]


def afd(*argv: str, folder: Path, deadline_s: float = 60.0) -> Ended:
    """Runs a command to its end; fails if it leaves a process behind."""
    began = time.monotonic()
    with environment(TMPDIR=str(folder), XDG_RUNTIME_DIR=""):
        done = subprocess.run(
            [*AFD, *argv], capture_output=True, text=True, timeout=deadline_s, check=False
        )
    seconds = time.monotonic() - began
    assert processes_of(folder) == {}
    return Ended(done.returncode, seconds, done.stdout, done.stderr)


def write_config(path: Path, config: dict[str, object]) -> str:
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(path)


@dataclass(frozen=True)
class Role:
    """A running role. log: the file with its output."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def says(self, words: str, deadline_s: float = 60.0) -> None:
        def said() -> bool:
            text = self.log.read_text(errors="replace")
            assert self.process.poll() is None, f"{self.name} has ended:\n{text[-2000:]}"
            return words in text

        wait_until(said, deadline_s, f"{self.name} says {words!r}")

    def stop(self, number: int = signal.SIGTERM, deadline_s: float = 30.0) -> int:
        """Sends a signal to the process, as a service manager does; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(deadline_s)


@contextlib.contextmanager
def role(name: str, *argv: str, folder: Path, program: Sequence[str] = AFD) -> Iterator[Role]:
    """Starts a command that keeps running; stops it afterwards and kills what is left of it.

    program: goes before ``argv``.
    """
    log = folder / f"{name}.log"
    with environment(TMPDIR=str(folder), XDG_RUNTIME_DIR=""), log.open("wb") as out:
        process = subprocess.Popen(
            [*program, *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Role(name, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
