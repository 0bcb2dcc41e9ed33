"""The supervisor, with small scripts as roles: order, failures, restarts, no leftovers."""

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from afd.config.deployment import Deployment
from afd.config.sections import Restart
from afd.errors import ConfigError
from afd.host.ports import accepts, check_free, held_ports
from afd_launch.cpus import CpuPlan, cpu_plan, plan_for
from afd_launch.process import Command, RoleProcess, describe_exit, group_members
from afd_launch.restarts import backoff_s
from afd_launch.role_log import RoleLog
from afd_launch.roles_of_host import Ports, role_specs
from afd_launch.serve import summary
from afd_launch.stall_monitor import StallMonitor
from afd_launch.supervisor import Stage, Supervisor
from afd_launch.watchdog import Watchdog

# A role that writes its pid to DIR/NAME.pid (one line per start), reports ready and waits.
ROLE = """
import os, signal, subprocess, sys, time
here, name = sys.argv[1], sys.argv[2]
def note(what, text):
    with open(os.path.join(here, name + "." + what), "a") as file:
        file.write(f"{text}\\n")
def starts():
    with open(os.path.join(here, name + ".pid")) as file:
        return len(file.readlines())
def on_term(*_):
    note("end", time.monotonic())
    sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
note("pid", os.getpid())
"""
READY = "note('ready', time.monotonic())\n"
WAIT = "while True: time.sleep(0.05)\n"


def role(here: Path, name: str, body: str = READY + WAIT) -> Command:
    script = here / f"{name}.py"
    script.write_text(ROLE + textwrap.dedent(body))
    return Command(name, (sys.executable, "-S", str(script), str(here), name))


def lines(here: Path, name: str, what: str) -> list[str]:
    path = here / f"{name}.{what}"
    return path.read_text().split() if path.exists() else []


def awaited(here: Path):
    """Returns a readiness check: ready once every start of the role has written its ready line.

    A start that has not written its pid yet is not ready, whatever the starts before it wrote.
    """

    def wait(name: str, group: int) -> str | None:
        pids = lines(here, name, "pid")
        ready = str(group) in pids and len(lines(here, name, "ready")) >= len(pids)
        return None if ready else "to say that it is ready"

    return wait


class Run:
    """Runs one supervisor in this process; calls ``after`` once all roles are ready."""

    def __init__(
        self, here: Path, *stages: Stage, after=None, start_s=10.0, restarts=3, window_s=30.0, **kw
    ):
        self.out = io.StringIO()
        watchdog = Watchdog(here / "run")
        supervisor = Supervisor(
            stages,
            awaited(here),
            start_s=start_s,
            restart=Restart(max_restarts=restarts, window_s=window_s),
            watchdog=watchdog,
            on_ready=after or (lambda: os.kill(os.getpid(), signal.SIGTERM)),
            out=self.out,
            **kw,
        )
        try:
            self.status = supervisor.run()
        finally:
            watchdog.close()
        self.text = self.out.getvalue()


def soon(condition, what: str, limit_s: float = 8.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


def alive(pid: str | int) -> bool:
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_roles_start_in_order_and_stop_in_reverse(tmp_path):
    slow = role(tmp_path, "ffn-0", "time.sleep(0.3)\n" + READY + WAIT)
    run = Run(
        tmp_path,
        Stage((slow,), 5),
        Stage((role(tmp_path, "attention-0"), role(tmp_path, "attention-1")), 5),
        Stage((role(tmp_path, "gateway-0"),), 5),
    )
    assert run.status == 0
    names = ("ffn-0", "attention-0", "gateway-0")
    ready = {name: float(lines(tmp_path, name, "ready")[0]) for name in names}
    ended = {name: float(lines(tmp_path, name, "end")[0]) for name in names}
    assert ready["ffn-0"] < ready["attention-0"] < ready["gateway-0"]
    assert ended["gateway-0"] < ended["attention-0"] < ended["ffn-0"]
    assert not any(group_members(int(lines(tmp_path, name, "pid")[0])) for name in ready)


def test_the_next_stage_starts_before_an_unawaited_one_is_ready(tmp_path):
    slow = role(tmp_path, "ffn-0", "time.sleep(0.6)\n" + READY + WAIT)
    run = Run(
        tmp_path,
        Stage((slow,), 5, awaited=False),
        Stage((role(tmp_path, "attention-0"),), 5),
        Stage((role(tmp_path, "gateway-0"),), 5),
    )
    assert run.status == 0
    names = ("attention-0", "ffn-0", "gateway-0")
    ready = [float(lines(tmp_path, name, "ready")[0]) for name in names]
    assert ready == sorted(ready)  # the gateway's stage waits for both
    ended = {name: float(lines(tmp_path, name, "end")[0]) for name in names}
    assert ended["gateway-0"] < ended["attention-0"] < ended["ffn-0"]


def test_crash_on_start_shows_the_last_lines_and_stops_the_rest(tmp_path, capsys):
    crash = role(tmp_path, "ffn-0", "for i in range(40): print('line', i)\nsys.exit(3)\n")
    run = Run(tmp_path, Stage((role(tmp_path, "control-0"),), 5), Stage((crash,), 5))
    assert run.status == 1
    assert "ffn-0 exited with status 3 during start-up" in capsys.readouterr().err
    assert "last 15 lines of ffn-0" in run.text
    tail = run.text.split("last 15 lines of ffn-0")[1]
    assert "    line 39" in tail and "    line 25" in tail and "    line 24" not in tail
    assert not alive(lines(tmp_path, "control-0", "pid")[0])


def test_a_failed_start_names_the_root_cause_of_a_traceback(tmp_path, capsys):
    """The last lines only refer to the cause, as those of vLLM's API server do."""
    crash = """
        try:
            raise ValueError("no memory for the cache blocks")
        except ValueError:
            import traceback
            traceback.print_exc()
        for i in range(40): print('line', i)
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    """
    run = Run(tmp_path, Stage((role(tmp_path, "attention-0", crash),), 5))
    assert run.status == 1
    message = capsys.readouterr().err
    assert "during start-up: ValueError: no memory for the cache blocks; see its last" in message
    assert "See root cause above" in run.text and "See root cause above" not in message


def test_never_ready_ends_at_the_deadline_and_names_what_is_awaited(tmp_path, capsys):
    run = Run(tmp_path, Stage((role(tmp_path, "ffn-0", WAIT),), 5), start_s=1.5)
    assert run.status == 1
    message = capsys.readouterr().err
    assert "1.5 s" in message and "ffn-0 to say that it is ready" in message
    assert not alive(lines(tmp_path, "ffn-0", "pid")[0])


def test_program_that_does_not_exist(tmp_path, capsys):
    run = Run(tmp_path, Stage((Command("ffn-0", ("/nonexistent/program",)),), 5))
    assert run.status == 1
    assert "cannot start ffn-0 (/nonexistent/program)" in capsys.readouterr().err


def test_a_crash_while_serving_is_restarted(tmp_path):
    once = READY + "if starts() == 1:\n    time.sleep(0.5)\n    os.abort()\n" + WAIT

    def after() -> None:
        # Ends the run a moment after the second start has written its ready line.
        subprocess.Popen(
            [sys.executable, "-S", "-c", _TERM_WHEN, str(tmp_path / "ffn-0.ready"), "2"]
        )

    run = Run(tmp_path, Stage((role(tmp_path, "ffn-0", once),), 5), after=after)
    assert run.status == 0
    assert "ffn-0 was killed by SIGABRT; starting it again" in run.text
    assert len(lines(tmp_path, "ffn-0", "pid")) == 2


# Sends SIGTERM to its parent a moment after the file argv[1] has argv[2] lines.
_TERM_WHEN = """
import os, signal, sys, time
path, count = sys.argv[1], int(sys.argv[2])
while not (os.path.exists(path) and len(open(path).readlines()) >= count): time.sleep(0.02)
time.sleep(0.3)
os.kill(os.getppid(), signal.SIGTERM)
"""


def test_a_stateless_role_that_stalls_is_ended_once_and_restarted(tmp_path, monkeypatch):
    """Both roles stop themselves, and the control plane misses both; only ffn-0 is stateless."""
    for name, value in (("LOOK_S", 0.1), ("RETURN_S", 0.5)):
        monkeypatch.setattr(f"afd_launch.stall_monitor.{name}", value)
    halt = READY + "if starts() == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n" + WAIT
    attention, ffn = (role(tmp_path, name, halt) for name in ("attention-0", "ffn-0"))

    def is_member(name: str) -> bool:
        return len(lines(tmp_path, name, "pid")) > 1

    def after() -> None:
        subprocess.Popen(
            [sys.executable, "-S", "-c", _TERM_WHEN, str(tmp_path / "ffn-0.ready"), "2"]
        )

    run = Run(
        tmp_path,
        Stage((replace(ffn, stateless=True),), 1),
        Stage((attention,), 1),
        after=after,
        stall_monitor=StallMonitor(is_member),
    )
    assert run.status == 0
    assert run.text.count("is stalled") == 1
    assert "ffn-0 was killed by SIGKILL; starting it again" in run.text
    assert len(lines(tmp_path, "ffn-0", "pid")) == 2
    assert len(lines(tmp_path, "attention-0", "pid")) == 1  # holds request state


def test_a_role_that_is_not_ready_after_its_restart_is_ended_once(tmp_path, monkeypatch):
    """Its death takes a moment, as that of a process with much memory does."""
    kill = RoleProcess.signal
    monkeypatch.setattr(
        RoleProcess, "signal", lambda *told: threading.Timer(0.5, kill, told).start()
    )
    here = role(tmp_path, "ffn-0", "while starts() == 2: time.sleep(0.05)\n" + READY + WAIT)

    def after() -> None:
        os.kill(int(lines(tmp_path, "ffn-0", "pid")[0]), signal.SIGKILL)
        subprocess.Popen(
            [sys.executable, "-S", "-c", _TERM_WHEN, str(tmp_path / "ffn-0.ready"), "2"]
        )

    run = Run(tmp_path, Stage((here,), 1), start_s=2.0, after=after)
    assert run.status == 0
    assert run.text.count("after its restart; ending it") == 1
    assert len(lines(tmp_path, "ffn-0", "pid")) == 3


@pytest.mark.parametrize("deaf", [False, True])
def test_a_role_that_left_with_its_requests_is_ended_and_restarted(tmp_path, monkeypatch, deaf):
    """Both attention roles left; attention-1 still listens."""
    monkeypatch.setattr("afd_launch.stall_monitor.LOOK_S", 0.1)
    monkeypatch.setattr("afd_launch.supervisor.KILL_WAIT_S", 0.5)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if deaf else ""
    gone = (ignore and f"if starts() == 1: {ignore}") + READY + WAIT
    left, listens = role(tmp_path, "attention-0", gone), role(tmp_path, "attention-1")
    other = role(tmp_path, "gateway-0")

    def is_serving(name: str) -> bool:
        return name == "attention-1" or len(lines(tmp_path, name, "pid")) > 1

    def after() -> None:
        subprocess.Popen(
            [sys.executable, "-S", "-c", _TERM_WHEN, str(tmp_path / "attention-0.ready"), "2"]
        )

    run = Run(
        tmp_path,
        Stage(tuple(replace(command, holds_requests=True) for command in (left, listens)), 1),
        Stage((other,), 1),
        after=after,
        leave_monitor=StallMonitor(is_serving, 1.5),
    )
    assert run.status == 0
    assert run.text.count("still lives after 1.5 s; ending it") == 1
    end = "was killed by SIGKILL" if deaf else "exited with status 0"
    assert f"attention-0 {end}; starting it again" in run.text
    starts = [len(lines(tmp_path, c.name, "pid")) for c in (left, listens, other)]
    assert starts == [2, 1, 1]


def test_too_many_crashes_stop_the_deployment(tmp_path, capsys):
    body = READY + "time.sleep(0.2)\nsys.exit(7)\n"
    run = Run(
        tmp_path,
        Stage((role(tmp_path, "control-0"),), 5),
        Stage((role(tmp_path, "ffn-0", body),), 5),
        after=lambda: None,
        restarts=1,
    )
    assert run.status == 1
    assert "ffn-0 exited with status 7, more than restart.max_restarts = 1 times" in (
        capsys.readouterr().err
    )
    assert len(lines(tmp_path, "ffn-0", "pid")) == 2
    assert not alive(lines(tmp_path, "control-0", "pid")[0])


def test_deaths_are_not_forgotten_during_slow_failing_starts(tmp_path, capsys):
    """Each start takes longer than window_s, after which deaths are usually forgotten."""
    body = (
        "if starts() > 1: time.sleep(0.5); sys.exit(7)\n" + READY + "time.sleep(0.3)\nsys.exit(7)\n"
    )
    run = Run(
        tmp_path,
        Stage((role(tmp_path, "ffn-0", body),), 5),
        after=lambda: None,
        restarts=1,
        window_s=0.4,
    )
    assert run.status == 1
    assert "more than restart.max_restarts = 1 times" in capsys.readouterr().err
    assert len(lines(tmp_path, "ffn-0", "pid")) == 2


def test_a_role_that_ignores_sigterm_is_killed_at_its_deadline(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + WAIT
    began = time.monotonic()
    run = Run(tmp_path, Stage((role(tmp_path, "ffn-0", stubborn),), 0.5))
    assert run.status == 0 and time.monotonic() - began < 6
    assert "ffn-0 did not end within its deadline; killing it" in run.text
    assert not alive(lines(tmp_path, "ffn-0", "pid")[0])


GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-S", "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
note("child", child.pid)
"""


def test_a_grandchild_that_ignores_sigterm_does_not_outlive_its_role(tmp_path):
    run = Run(tmp_path, Stage((role(tmp_path, "attention-0", GRANDCHILD + READY + WAIT),), 0.5))
    assert run.status == 0
    assert not alive(lines(tmp_path, "attention-0", "child")[0])


def test_the_grandchild_of_a_crashed_role_is_ended_before_the_restart(tmp_path, capsys):
    body = GRANDCHILD + READY + "time.sleep(0.2)\nos.abort()\n"
    run = Run(
        tmp_path,
        Stage((role(tmp_path, "attention-0", body),), 5),
        after=lambda: None,
        restarts=0,
    )
    assert run.status == 1
    assert not alive(lines(tmp_path, "attention-0", "child")[0])


def test_log_dir_gets_one_file_per_role(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    body = "print('hello from the role', flush=True)\n" + READY + WAIT
    run = Run(tmp_path, Stage((role(tmp_path, "ffn-0", body),), 5), log_dir=logs)
    assert (logs / "ffn-0.log").read_text() == "hello from the role\n"
    assert "hello from the role" not in run.text


SUPERVISE = """
import sys
from pathlib import Path
from afd.config.sections import Restart
from afd_launch.process import Command
from afd_launch.supervisor import Stage, Supervisor
from afd_launch.watchdog import Watchdog
here = Path(sys.argv[1])
names = sys.argv[2].split(",")
def awaited(name, group):
    return None if (here / f"{name}.ready").exists() else "to be ready"
commands = [Command(n, (sys.executable, "-S", str(here / f"{n}.py"), str(here), n)) for n in names]
run_dir = here / "run"
run_dir.mkdir()
(run_dir / "role.json").write_text("{}")
sys.exit(Supervisor([Stage((c,), float(sys.argv[3])) for c in commands], awaited, start_s=10,
    restart=Restart(), watchdog=Watchdog(run_dir),
    on_ready=lambda: print("all ready", flush=True)).run())
"""


def supervise(here: Path, names: str, stop_s: float) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(here), names, str(stop_s)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "all ready" in line:
            return process
    raise AssertionError("the supervisor ended before all roles were ready")


def test_sigkill_of_the_supervisor_leaves_nothing(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + WAIT
    role(tmp_path, "ffn-0", stubborn)
    role(tmp_path, "attention-0", GRANDCHILD + READY + WAIT)
    process = supervise(tmp_path, "ffn-0,attention-0", 5)
    pids = [lines(tmp_path, name, "pid")[0] for name in ("ffn-0", "attention-0")]
    pids += lines(tmp_path, "attention-0", "child")
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.wait()
    soon(lambda: not any(alive(pid) for pid in pids), "roles and grandchild gone")
    soon(lambda: not (tmp_path / "run").exists(), "run directory removed")


def test_second_ctrl_c_ends_the_drain_at_once(tmp_path):
    role(tmp_path, "gateway-0", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + WAIT)
    process = supervise(tmp_path, "gateway-0", 60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # the supervisor waits for the gateway to drain
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "stopping" in out
    assert not alive(lines(tmp_path, "gateway-0", "pid")[0])


def test_a_held_port_is_usable_only_with_reuseaddr():
    """asyncio and ZeroMQ can listen on a held port, one at a time. A bind without SO_REUSEADDR
    fails, and the kernel does not choose a held port (seen in a network namespace of ten ports)."""
    import zmq

    async def serve(port):
        server = await asyncio.start_server(
            lambda reader, writer: writer.close(), "127.0.0.1", port
        )
        assert accepts("127.0.0.1", port)
        with pytest.raises(ConfigError, match="in use"):
            check_free("127.0.0.1", port, "gateway.port")
        server.close()
        await server.wait_closed()

    with held_ports(["127.0.0.1"] * 3) as ports:
        assert len(set(ports)) == 3
        asyncio.run(serve(ports[0]))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"tcp://127.0.0.1:{ports[1]}")
            assert accepts("127.0.0.1", ports[1])
        for port in ports:
            check_free("127.0.0.1", port, "gateway.port")  # as `afd serve` does for its own ports
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[2]))


def test_port_in_use_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert accepts("127.0.0.1", port)
        with pytest.raises(ConfigError, match=rf"port {port} is in use .*change gateway\.port"):
            check_free("127.0.0.1", port, "gateway.port")
    with held_ports(["127.0.0.1"]) as (port,):
        check_free("127.0.0.1", port, "gateway.port")


def test_unusable_host_names_the_setting():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*change attention\.host"):
        check_free("192.0.2.1", 8100, "attention.host")


@pytest.mark.parametrize(
    ("cores", "x", "y", "attention", "ffn"),
    [
        ([0, 1], 1, 1, [(0,)], [(1,)]),
        ([0, 1, 2, 3], 1, 1, [(0, 1)], [(2, 3)]),
        ([4, 5, 6, 7, 8], 1, 1, [(4, 5, 6)], [(7, 8)]),
        ([0, 1], 2, 1, [(0,), (1,)], [(0,)]),
        ([3], 1, 1, [(3,)], [(3,)]),
        ([0, 1, 2, 3], 2, 2, [(0,), (1,)], [(2,), (3,)]),
    ],
)
def test_cpu_plan(cores, x, y, attention, ffn):
    plan = cpu_plan(cores, x, y)
    assert list(plan.attention) == attention
    assert list(plan.ffn) == ffn


def test_cpu_plan_uses_every_core_once_when_there_are_enough():
    for cores in range(2, 40):
        for x in range(1, 5):
            for y in range(1, 5):
                plan = cpu_plan(range(cores), x, y)
                dealt = [core for cores_of in plan.attention + plan.ffn for core in cores_of]
                assert len(plan.attention) == x and len(plan.ffn) == y
                if x + y <= cores:
                    assert sorted(dealt) == list(range(cores))
                else:
                    assert all(len(cores_of) == 1 for cores_of in plan.attention + plan.ffn)


def test_every_rank_is_a_process_with_its_own_cores():
    data = {"model": "m", "attention": {"port": 0}, "ffn": {"instances": 2, "tp": 2}}
    deployment = Deployment.from_plain(data)
    specs = role_specs(deployment, Ports(1, (2,), "tcp://127.0.0.1:3"), range(5))
    ranks = [spec for spec in specs if spec.role == "ffn"]
    assert [spec.id for spec in ranks] == ["ffn-0", "ffn-0.1", "ffn-1", "ffn-1.1"]
    assert [spec.cpus for spec in ranks] == [(1,), (2,), (3,), (4,)]
    assert "1 attention + 2 FFN of 2 ranks" in summary(deployment)


@pytest.mark.parametrize(
    ("cores", "attention", "ffn"),
    [(6, (0, 1, 2, 3), (4, 5)), (3, (0, 1), (2,)), (2, (0, 1), (0,)), (1, (0,), (0,))],
)
def test_an_attention_instance_gets_cores_for_all_its_ranks(cores, attention, ffn):
    data = {"model": "m", "attention": {"tp": 2}}
    plan = plan_for(Deployment.from_plain(data), range(cores))
    assert plan == CpuPlan((attention,), (ffn,))


def test_core_lists_of_the_file_override_the_plan():
    data = {"model": "m", "ffn": {"instances": 2, "cpus": [[5], [6, 7]]}}
    plan = plan_for(Deployment.from_plain(data), [0, 1, 2, 5, 6, 7])
    assert plan.ffn == ((5,), (6, 7))
    assert plan.attention == ((0, 1),)
    with pytest.raises(
        ConfigError, match=r"ffn\.cpus names cores .* \(6, 7\); it may use 0, 1, 5$"
    ):
        plan_for(Deployment.from_plain(data), [0, 1, 5])


def test_backoff_doubles_forgets_old_deaths_and_gives_up():
    assert backoff_s([100.0], 100.0, 3, 60.0) == 0.0
    assert backoff_s([95.0, 100.0], 100.0, 3, 60.0) == 0.5
    assert backoff_s([90.0, 95.0, 100.0], 100.0, 3, 60.0) == 1.0
    assert backoff_s([10.0, 20.0, 30.0, 100.0], 100.0, 3, 60.0) == 0.0
    assert backoff_s([97.0, 98.0, 99.0, 100.0], 100.0, 3, 60.0) is None
    assert backoff_s([100.0], 100.0, 0, 60.0) is None
    assert backoff_s([100.0] * 50, 100.0, 99, 60.0) == 10.0


def test_role_log_prefixes_lines_and_keeps_a_tail(tmp_path):
    out = io.StringIO()
    log = RoleLog("ffn-1", out=out)
    log.feed(b"one\ntw")
    log.feed(b"o\n10%\r20%\rdone\nlast")
    log.close()
    assert out.getvalue() == "[ffn-1] one\n[ffn-1] two\n[ffn-1] done\n[ffn-1] last\n"
    assert log.tail() == ["one", "two", "done", "last"]


def test_exit_descriptions():
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "was killed by SIGKILL"
