"""A process that waits forks itself for each dead role, and never outlives its supervisor."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_supervisor import Run, alive, lines, role, soon

from afd_launch import standby as module
from afd_launch.process import Command
from afd_launch.standby import Standby, Standbys
from afd_launch.supervisor import Stage
from afd_launch.watchdog import Watchdog

ROOT = Path(__file__).parents[3]

# Stands in for `python -m afd_launch.ffn_standby`: notes its pid, waits for orders, is the role.
# {before} and {after} are code.
WAITS = """
import os, signal, sys, time
sys.path.insert(0, "{root}")
from afd_launch import standby_process
def note(what, text):
    with open("{here}/" + what, "a") as file: file.write(f"{{text}}\\n")
note("waiting.pid", os.getpid())
{before}
order = standby_process.await_order()
if order is None: sys.exit(0)
note("orders", order.file)
note(order.file + ".pid", os.getpid())
{after}
note(order.file + ".ready", time.monotonic())
while True: time.sleep(0.05)
"""


@pytest.fixture
def watchdog():
    watchdog = Watchdog()
    yield watchdog
    watchdog.close()


def stand_in(here: Path, before: str = "", after: str = "") -> tuple[str, ...]:
    """Returns Command.standby of a stand-in."""
    text = WAITS.format(
        root=ROOT, here=here, before=textwrap.dedent(before), after=textwrap.dedent(after)
    )
    (here / "waits.py").write_text(text)
    return (sys.executable, "-S", str(here / "waits.py"))


def waiting(here: Path, **code: str) -> tuple[Standby, Command]:
    """Returns a process that waits, ready, and the command of a role that it can be."""
    command = replace(role(here, "ffn-0"), standby=stand_in(here, **code))
    standby = Standby(Watchdog())
    standby.keep(command)
    soon(standby.is_ready, "it waits")
    return standby, command


def children() -> set[psutil.Process]:
    """Of this process, ended or not. Other tests may have left some."""
    return {*psutil.Process().children()}


def orders(here: Path) -> list[str]:
    return (here / "orders").read_text().split()


def end(process) -> None:
    process.signal(signal.SIGKILL)
    soon(process.gone, "it has ended")
    process.close()


# -- under a supervisor


class Killing(Run):
    """Runs a supervisor. Kills ffn-0 as soon as a process waits and whenever it is ready, ``times``
    times, until ``waited`` processes have begun to wait."""

    def __init__(self, here: Path, times: int, command: Command, waited: int = 1) -> None:
        self._here, self._times, self._waited = here, times, waited
        self.took_s = 0.0
        # The supervisor starts the process that waits after `after`, so that cannot wait for it.
        start = threading.Thread(target=self._kill, daemon=True).start
        super().__init__(here, Stage((command,), 1), after=start)

    def _kill(self) -> None:
        def count(name: str, what: str) -> int:
            return len(lines(self._here, name, what))

        try:
            soon(lambda: count("waiting", "pid") > 0, "a process waits")
            began = time.monotonic()
            for n in range(1, self._times + 1):
                os.kill(int(lines(self._here, "ffn-0", "pid")[-1]), signal.SIGKILL)
                soon(lambda n=n: count("ffn-0", "ready") > n, "it is back")
            self.took_s = time.monotonic() - began
            soon(lambda: count("waiting", "pid") >= self._waited, "the next one waits")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def test_three_quick_deaths_are_each_served_by_a_fork_of_one_process_that_waits(tmp_path):
    command = replace(role(tmp_path, "ffn-0"), standby=stand_in(tmp_path))
    before = children()
    run = Killing(tmp_path, 3, command)
    assert run.status == 0, run.text
    assert run.text.count("ffn-0 was killed by SIGKILL; starting it again") == 3
    assert run.took_s < 3.0
    assert orders(tmp_path) == ["ffn-0"] * 3
    pids = lines(tmp_path, "ffn-0", "pid")
    assert len(set(pids)) == 4
    assert len(lines(tmp_path, "waiting", "pid")) == 1
    assert not any(alive(pid) for pid in (*pids, *lines(tmp_path, "waiting", "pid")))
    assert not children() - before  # ended or not


def test_a_role_that_dies_early_waits_for_the_process_that_imports(tmp_path):
    slow = stand_in(tmp_path, before="time.sleep(1.0)")
    run = Killing(tmp_path, 1, replace(role(tmp_path, "ffn-0"), standby=slow))
    assert run.status == 0, run.text
    assert orders(tmp_path) == ["ffn-0"]


def test_one_that_cannot_be_forked_is_the_role_itself_and_another_one_waits(tmp_path):
    threads = """
        import threading
        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
    """
    command = replace(role(tmp_path, "ffn-0"), standby=stand_in(tmp_path, before=threads))
    run = Killing(tmp_path, 1, command, waited=2)
    assert run.status == 0, run.text
    assert "no fork of the process that waited, which has other threads" in run.text
    waited = lines(tmp_path, "waiting", "pid")
    assert len(waited) == 2 and lines(tmp_path, "ffn-0", "pid")[1] == waited[0]
    assert not any(alive(pid) for pid in waited)


def test_roles_that_are_forked_from_the_start_share_one_import(tmp_path):
    kind = stand_in(tmp_path, before="time.sleep(0.5)")
    first, second, other = (
        replace(role(tmp_path, f"ffn-{index}"), standby=kind, forked=True) for index in range(3)
    )
    other = replace(other, env={"OMP_NUM_THREADS": "9"})
    run = Run(tmp_path, Stage((first, second, other), 1))
    assert run.status == 0, run.text
    assert len(lines(tmp_path, "waiting", "pid")) == 1
    # Forks run side by side. The role with other variables is started.
    assert sorted(orders(tmp_path)) == ["ffn-0", "ffn-1"]


def test_a_process_that_cannot_import_leaves_the_first_start_to_the_role(tmp_path, capsys):
    ends = stand_in(tmp_path, before="sys.exit('afd: error: no such model')")
    crash = role(tmp_path, "ffn-0", "sys.exit('afd: error: no such model')")
    run = Run(tmp_path, Stage((replace(crash, standby=ends, forked=True),), 1))
    assert run.status == 1
    assert capsys.readouterr().err.endswith("afd: error: ffn-0: no such model\n")
    assert len(lines(tmp_path, "ffn-0", "pid")) == 1


def test_one_that_still_imports_at_the_deadline_is_named(tmp_path, capsys):
    slow = stand_in(tmp_path, before="time.sleep(99)")
    command = replace(role(tmp_path, "ffn-0"), standby=slow, forked=True)
    run = Run(tmp_path, Stage((command,), 1), start_s=0.8)
    assert run.status == 1
    assert "not ready after 0.8 s (deadlines.start_s), waiting for ffn-0 to start" in (
        capsys.readouterr().err
    )


SUPERVISE = """
import sys
from dataclasses import replace
from pathlib import Path
from afd.config.sections import Restart
from afd_launch.process import Command
from afd_launch.supervisor import Stage, Supervisor
from afd_launch.watchdog import Watchdog
here = Path(sys.argv[1])
command = Command("ffn-0", (sys.executable, "-S", str(here / "ffn-0.py"), str(here), "ffn-0"),
    standby=(sys.executable, "-S", str(here / "waits.py")))
Supervisor([Stage((command,), 1)], lambda name, group: None, start_s=10, restart=Restart(),
    watchdog=Watchdog()).run()
"""


def test_sigkill_of_the_supervisor_ends_forks_and_the_process_that_waits(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    role(tmp_path, "ffn-0")
    stand_in(tmp_path, after=stubborn)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(tmp_path)], stdout=subprocess.DEVNULL
    )
    soon(lambda: bool(lines(tmp_path, "waiting", "pid")), "a process waits")
    os.kill(int(lines(tmp_path, "ffn-0", "pid")[0]), signal.SIGKILL)
    soon(lambda: len(lines(tmp_path, "ffn-0", "ready")) == 2, "it is back")
    pids = [*lines(tmp_path, "ffn-0", "pid"), *lines(tmp_path, "waiting", "pid")]
    assert orders(tmp_path) and alive(pids[1]) and alive(pids[2])
    supervisor.kill()
    supervisor.wait()
    soon(lambda: not any(alive(pid) for pid in pids), "nothing is left")


# -- one process that waits


def test_a_fork_has_what_a_started_role_has(tmp_path):
    """Its own session, the supervisor as parent and the signal at its death, no descriptor of the
    process that waits, another random state; its output and exit status arrive."""
    numpy = f"import random; sys.path += {sys.path!r}; import numpy"
    tell = """
        import ctypes, random
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))
        print(os.getsid(0) == os.getpid(), os.getppid(), number.value,
              len(os.listdir("/proc/self/fd")), os.read(0, 1), flush=True)
        note("random", f"{random.random()} {numpy.random.random()}")
        sys.exit(5)
    """
    before = children()
    standby, command = waiting(tmp_path, before=numpy, after=tell)
    for _ in range(2):
        process = standby.take(command)
        assert process is not None and process.name == "ffn-0"
        soon(process.gone, "it has ended")
        assert process.exit_code() == 5
        told = os.read(process.output, 999).decode()
        assert told == f"True {os.getpid()} {signal.SIGTERM} 4 b''\n"  # 0, 1, 2 and the folder
        process.close()
    drawn = (tmp_path / "random").read_text().split()
    assert len(set(drawn)) == len(drawn) == 4
    standby.close()
    assert len(children() - before) <= 1  # its watchdog


def test_it_is_not_taken_for_another_kind_of_role(tmp_path, watchdog):
    kind = stand_in(tmp_path)
    ffn = Command("ffn-0", ("x", "--role-file", "ffn-0.json"), {"A": "1"}, standby=kind)
    standbys = Standbys(watchdog)
    standbys.keep([ffn], busy=False)
    assert standbys.take(ffn) is None and standbys.imports(ffn)
    assert not standbys.imports(replace(ffn, env={"A": "2"}))
    soon(lambda: standbys.is_ready(ffn), "it waits")
    assert not standbys.imports(ffn)
    assert standbys.take(replace(ffn, env={"A": "2"})) is None
    assert standbys.take(replace(ffn, standby=())) is None
    assert standbys.take(replace(ffn, standby=(*kind, "other"))) is None
    processes = [standbys.take(ffn) for _ in range(2)]
    assert all(process is not None and process.name == "ffn-0" for process in processes)
    for process in processes:
        end(process)
    standbys.close()


def test_none_begins_to_import_while_a_role_starts(tmp_path, watchdog):
    ffn = Command("ffn-0", ("x",), standby=stand_in(tmp_path))
    standbys = Standbys(watchdog)
    standbys.keep([ffn], busy=True)
    assert not standbys.imports(ffn)
    standbys.keep([ffn], busy=False)
    standbys.keep([ffn], busy=True)  # one that imports already goes on
    assert standbys.imports(ffn)
    standbys.close()
    assert not standbys.imports(ffn)


def test_one_that_ends_is_not_started_again_and_again(watchdog):
    said: list[str] = []
    ends = (sys.executable, "-S", "-c", "print('no memory'); raise SystemExit(3)")
    ffn = Command("ffn-0", ("x",), standby=ends)
    standby = Standby(watchdog, said.append)
    standby.keep(ffn)
    process = standby._waiting.process
    soon(lambda: process.exit_code() is not None, "it has ended")
    assert standby.take(ffn) is None and not standby.imports(ffn)
    standby.keep(ffn)
    standby.keep(ffn)
    assert standby._waiting is None
    assert said == [
        "the process that waits to replace ffn-0 exited with status 3: no memory; another one waits"
        " in 60 s"
    ]
    standby.close()


# The first fork makes no second one: it dies before, or cannot.
DIES = """
    fork, forks = os.fork, []
    def once():
        forks.append(1)
        if len(forks) > 1: {how}
        return fork()
    os.fork = once
"""


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "raise OSError"])
def test_a_death_between_the_two_forks_is_no_start_and_it_waits_on(tmp_path, how):
    standby, command = waiting(tmp_path, before=DIES.format(how=how))
    assert standby.take(command) is None
    assert not lines(tmp_path, "ffn-0", "pid")
    assert alive(lines(tmp_path, "waiting", "pid")[0])
    standby.close()


def test_one_that_does_not_answer_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    standby, command = waiting(tmp_path)
    pid = int(lines(tmp_path, "waiting", "pid")[0])
    os.kill(pid, signal.SIGSTOP)
    assert standby.take(command) is None
    assert not alive(pid) and not lines(tmp_path, "ffn-0", "pid")


def test_a_role_lives_on_when_the_process_that_waits_dies(tmp_path):
    standby, command = waiting(tmp_path)
    process = standby.take(command)
    os.kill(int(lines(tmp_path, "waiting", "pid")[0]), signal.SIGKILL)
    soon(lambda: not standby.is_ready() or standby._waiting.process.gone(), "it has ended")
    soon(lambda: bool(lines(tmp_path, "ffn-0", "ready")), "the role runs")
    assert process.exit_code() is None
    assert standby.take(command) is None
    end(process)
    standby.close()
