"""The supervisor of one of several hosts: it waits, gives up, and holds restarts without a host."""

import os
import signal
import threading
from dataclasses import replace

from test_supervisor import READY, WAIT, Run, lines, role, soon

from afd.errors import ConfigError
from afd_launch.host_watch import HostWatch
from afd_launch.supervisor import Stage


class FakeHosts:
    """One other host. away: what is missing; None: it is there."""

    def __init__(self, away: str | None = None, limit_s: float = 30.0) -> None:
        self.away = away
        self.limit_s = limit_s
        self.told: list[str] = []
        self.objection = ""
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1
        if self.objection:
            raise ConfigError(self.objection)

    def waiting_for(self) -> str | None:
        return self.away

    def lacks_needed(self) -> bool:
        return self.away is not None

    def never_came(self) -> str:
        return "host b (ffn-1) did not come within 1 s; start it there"

    def tell(self, fault: str) -> None:
        self.told.append(fault)


def watch(hosts: FakeHosts) -> HostWatch:
    return HostWatch(hosts, print)


def test_roles_start_once_every_host_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("afd_launch.start_progress.PROGRESS_S", 0.3)
    hosts = FakeHosts("host b (ffn-1)")

    def come() -> None:
        soon(lambda: lines(tmp_path, "control-0", "ready"), "the control plane runs")
        soon(lambda: hosts.turns > 8, "the supervisor waits")
        assert not lines(tmp_path, "ffn-0", "pid")
        hosts.away = None

    friend = threading.Thread(target=come)
    friend.start()
    run = Run(
        tmp_path,
        Stage((role(tmp_path, "control-0"),), 5, first=True),
        Stage((role(tmp_path, "ffn-0"),), 5),
        hosts=watch(hosts),
    )
    friend.join()
    assert run.status == 0 and lines(tmp_path, "ffn-0", "ready")
    assert " s, waiting for host b (ffn-1)\n" in run.text and not hosts.told


def test_it_gives_up_with_one_sentence_that_names_the_host(tmp_path, capsys):
    hosts = FakeHosts("host b (ffn-1)", limit_s=1.0)
    control = Stage((role(tmp_path, "control-0"),), 5, first=True)
    run = Run(tmp_path, control, Stage((role(tmp_path, "ffn-0"),), 5), hosts=watch(hosts))
    said = capsys.readouterr().err
    assert run.status == 1 and not lines(tmp_path, "ffn-0", "pid")
    assert said == "afd: error: host b (ffn-1) did not come within 1 s; start it there\n"


def test_an_objection_ends_the_start_and_reaches_the_others(tmp_path, capsys):
    hosts = FakeHosts()
    hosts.objection = "host b has afd 1, but host a has 2; install the same version"
    run = Run(tmp_path, Stage((role(tmp_path, "ffn-0"),), 5), hosts=watch(hosts))
    assert run.status == 1 and hosts.told == [hosts.objection]
    assert hosts.objection in capsys.readouterr().err


def test_restarts_wait_for_a_host_that_is_away(tmp_path, capsys):
    """A role that dies without its peers is started when they are back, and none is given up."""
    hosts = FakeHosts()
    body = READY + "if starts() == 1: time.sleep(0.3); sys.exit(7)\n" + WAIT
    attention = replace(role(tmp_path, "attention-0", body), holds_requests=True)

    def later() -> None:
        soon(lambda: hosts.turns > 25, "the supervisor holds the restart")
        assert len(lines(tmp_path, "attention-0", "pid")) == 1
        hosts.away = None
        soon(lambda: len(lines(tmp_path, "attention-0", "ready")) == 2, "it is started again")
        os.kill(os.getpid(), signal.SIGTERM)

    def after() -> None:
        hosts.away = "host b (ffn-1)"
        threading.Thread(target=later).start()

    run = Run(tmp_path, Stage((attention,), 5), after=after, hosts=watch(hosts))
    assert run.status == 0
    said = capsys.readouterr().out
    assert said.splitlines() == ["waiting for host b (ffn-1)", "every host is there again"]
