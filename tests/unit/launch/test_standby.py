"""A process that waits takes over from a dead role, and never outlives its supervisor."""

import subprocess
import sys
from dataclasses import replace

import pytest
from test_supervisor import _TERM_WHEN, READY, WAIT, Run, alive, lines, role, soon

from afd_launch.process import Command
from afd_launch.standby import Standby
from afd_launch.supervisor import Stage
from afd_launch.watchdog import Watchdog

# Stands in for `python -m afd_launch.standby`: notes its pid, waits for a line, then is the role.
WAITS = """
import os, sys, time
sys.path.insert(0, "{here}")
with open("{here}/waiting.pid", "a") as file: file.write(f"{{os.getpid()}}\\n")
file = sys.stdin.readline().strip()
if not file: sys.exit(0)
with open("{here}/ffn-0.pid", "a") as out: out.write(f"{{os.getpid()}}\\n")
with open("{here}/ffn-0.ready", "a") as out: out.write(f"{{file}}\\n")
while True: time.sleep(0.05)
"""


@pytest.fixture
def watchdog():
    watchdog = Watchdog()
    yield watchdog
    watchdog.close()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "waits.py").write_text(WAITS.format(here=tmp_path))
    argv = (sys.executable, "-S", str(tmp_path / "waits.py"))
    monkeypatch.setattr("afd_launch.standby.ARGV", argv)


def test_the_waiting_process_takes_over(tmp_path, stand_in):
    once = READY + "if starts() == 1:\n    time.sleep(1.0)\n    os.abort()\n" + WAIT
    command = replace(role(tmp_path, "ffn-0", once), replaced_at_once=True)

    def after():
        subprocess.Popen(
            [sys.executable, "-S", "-c", _TERM_WHEN, str(tmp_path / "waiting.pid"), "2"]
        )

    run = Run(tmp_path, Stage((command,), 1), after=after)
    assert run.status == 0
    first, second = lines(tmp_path, "waiting", "pid")
    assert lines(tmp_path, "ffn-0", "pid")[1] == first  # it took over, and another one waits
    assert lines(tmp_path, "ffn-0", "ready")[1] == command.argv[-1]
    assert not alive(first) and not alive(second)


def test_it_is_not_taken_for_another_kind_of_role(stand_in, watchdog):
    ffn = Command("ffn-0", ("x", "--role-file", "ffn-0.json"), {"A": "1"}, replaced_at_once=True)
    standby = Standby(watchdog)
    standby.keep(ffn)
    assert standby.take(replace(ffn, env={"A": "2"})) is None
    assert standby.take(replace(ffn, replaced_at_once=False)) is None
    process = standby.take(ffn)
    assert process is not None and process.name == "ffn-0"
    assert standby.take(ffn) is None
    process.signal(9)
    soon(process.gone, "it has ended")
    process.close()


def test_one_that_ends_is_not_started_again_and_again(tmp_path, monkeypatch, watchdog):
    monkeypatch.setattr("afd_launch.standby.ARGV", (sys.executable, "-S", "-c", "raise SystemExit"))
    ffn = Command("ffn-0", ("x",), replaced_at_once=True)
    standby = Standby(watchdog)
    standby.keep(ffn)
    waiting = standby._waiting
    assert waiting is not None
    soon(lambda: waiting.exit_code() is not None, "it has ended")
    assert standby.take(ffn) is None
    standby.keep(ffn)
    assert standby._waiting is None
    standby.close()
