"""The supervisor's own faults: nobody reads its output, its disk is full, it fails or is killed."""

import contextlib
import fcntl
import io
import os
import signal
import subprocess
import sys
import time

import pytest
from test_supervisor import READY, WAIT, Run, alive, lines, role, soon

from afd.errors import ConfigError
from afd_launch.output import Output
from afd_launch.private_folder import private_folder
from afd_launch.role_log import RoleLog
from afd_launch.supervisor import Stage

_F_SETPIPE_SZ = 1031


@pytest.fixture
def pipe():
    """(read end, write end) of a pipe of one page."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, _F_SETPIPE_SZ, 4096)
    yield reading, writing
    for end in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(end)


def test_output_that_nobody_reads_is_dropped_and_counted(pipe):
    reading, writing = pipe
    output = Output(writing, queue_bytes=20_000)
    began = time.monotonic()
    for number in range(2000):
        print(f"line {number} {'.' * 90}", file=output, flush=True)
    assert time.monotonic() - began < 1.0
    assert output.dropped > 1000
    text = ""

    def counted() -> tuple[list[int], int]:
        whole = [line.split() for line in text.split("\n")[:-1]]
        kept = [int(words[1]) for words in whole if words[0] == "line"]
        return kept, sum(int(words[1]) for words in whole if words[0] == "[afd]")

    while len(counted()[0]) + counted()[1] < 2000:
        text += os.read(reading, 1 << 16).decode()
    kept, dropped = counted()
    assert kept == sorted(kept) and kept[0] == 0 and dropped == output.dropped
    output.finish()


def test_output_is_whole_and_in_order_at_the_end(pipe):
    reading, writing = pipe
    output = Output(writing)
    for number in range(20):
        output.write(f"{number}\n")
    output.write("no newline")
    output.finish()
    os.close(writing)
    assert os.read(reading, 4096).decode().split("\n") == [*map(str, range(20)), "no newline", ""]


def test_finish_does_not_wait_for_a_reader(pipe):
    reading, writing = pipe
    output = Output(writing)
    output.write("x" * 10_000 + "\n")
    began = time.monotonic()
    output.finish(0.2)
    assert time.monotonic() - began < 2
    os.close(reading)
    output.finish()  # otherwise its thread would write into the next file of this number


def test_a_reader_that_went_away_does_no_harm(pipe):
    reading, writing = pipe
    os.close(reading)
    output = Output(writing)
    output.write("nobody\n")
    soon(lambda: output.dropped == 1, "the line is counted")
    output.finish()


# A supervisor whose role floods its output, dies once, and is to be started again.
_FLOOD = """
if starts() == 1:
    for n in range(20000): print("x" * 200, flush=True)
    note("flooded", n)
    os.abort()
"""
_SERVE = """
import sys
from pathlib import Path
from afd.config.sections import Restart
from afd_launch.output import unblocked_output
from afd_launch.private_folder import private_folder
from afd_launch.process import Command
from afd_launch.supervisor import Stage, Supervisor
here = Path(sys.argv[1])
def awaited(name, group):
    return None if (here / f"{name}.ready").exists() else "to be ready"
role = Command("ffn-0", (sys.executable, "-S", str(here / "ffn-0.py"), str(here), "ffn-0"))
with unblocked_output(), private_folder() as (folder, watchdog):
    (here / "folder").write_text(str(folder))
    status = Supervisor([Stage((role,), 1)], awaited, start_s=20, restart=Restart(),
        watchdog=watchdog).run()
sys.exit(status)
"""


def serve(here, **kwargs):
    return subprocess.Popen([sys.executable, "-c", _SERVE, str(here)], **kwargs)


def test_a_supervisor_whose_output_nobody_reads_restarts_a_dead_role(tmp_path):
    role(tmp_path, "ffn-0", READY + _FLOOD + WAIT)
    process = serve(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    soon(lambda: len(lines(tmp_path, "ffn-0", "ready")) == 2, "ffn-0 was started again", 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0  # nor does it wait for a reader at its end
    assert not alive(lines(tmp_path, "ffn-0", "pid")[-1])


def test_a_supervisor_killed_at_any_moment_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    # The role writes into the folder until it is killed.
    busy = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        folder = open(os.path.join(here, "folder")).read()
        while True:
            try:
                os.makedirs(folder + "/deep", exist_ok=True)
                open(folder + "/deep/" + str(time.monotonic()), "w").close()
            except OSError: pass
            time.sleep(0.002)  # else there are 100,000 files to remove
    """
    role(tmp_path, "ffn-0", READY + busy)
    for delay_s in (0.0, 0.5):
        process = serve(tmp_path)
        soon(lambda: list((tmp_path / "run").iterdir()), "the folder exists", 20)
        time.sleep(delay_s)
        process.kill()
        process.wait()
        soon(lambda: not list((tmp_path / "run").iterdir()), "the folder is gone", 20)
        (tmp_path / "folder").unlink(missing_ok=True)


def test_a_failure_inside_the_private_folder_ends_what_was_started(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    with pytest.raises(ZeroDivisionError), private_folder() as (_folder, watchdog):
        watchdog.add(child.pid)
        raise ZeroDivisionError
    assert child.wait(5) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_no_space_for_the_private_folder_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with (
        pytest.raises(ConfigError, match=r"cannot write /dev/full: No space left .*set TMPDIR"),
        private_folder(),
    ):
        raise OSError(28, "No space left on device", "/dev/full")


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path):
    """/dev/full refuses every write, as a full disk does."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("ffn-0", "attention-0"):
        (logs / f"{name}.log").symlink_to("/dev/full")
    once = (
        READY
        + "print('line')\n" * 3
        + "if starts() == 1:\n"
        + "    while not os.path.exists(os.path.join(here, 'serves')): time.sleep(0.02)\n"
        + "    os.abort()\n"
        + WAIT
    )
    first, second = (role(tmp_path, name, once) for name in ("ffn-0", "attention-0"))

    def after():
        subprocess.Popen([sys.executable, "-S", "-c", _TERM, str(tmp_path)])
        (tmp_path / "serves").touch()

    run = Run(tmp_path, Stage((first,), 1), Stage((second,), 1), after=after, log_dir=logs)
    assert run.status == 0
    assert [len(lines(tmp_path, name, "pid")) for name in ("ffn-0", "attention-0")] == [2, 2]
    assert run.text.count("cannot write") == 1
    assert "No space left on device; serving goes on" in run.text


# Sends SIGTERM to its parent once both roles were ready twice.
_TERM = """
import os, signal, sys, time
def ready(name):
    with open(f"{sys.argv[1]}/{name}.ready") as file: return len(file.readlines())
while ready("ffn-0") < 2 or ready("attention-0") < 2: time.sleep(0.02)
time.sleep(0.3)
os.kill(os.getppid(), signal.SIGTERM)
"""


def test_a_log_says_how_many_lines_it_lost(tmp_path):
    lost = []
    log = RoleLog("ffn-0", out=io.StringIO(), directory=tmp_path / "later", on_loss=lost.append)
    log.feed(b"one\ntwo\n")
    assert log.tail() == ["one", "two"] and len(lost) == 1
    (tmp_path / "later").mkdir()
    log.feed(b"three\n")
    log.close()
    assert (tmp_path / "later" / "ffn-0.log").read_text() == "2 lines were lost here\nthree\n"
