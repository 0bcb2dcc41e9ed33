"""The supervisor follows operators: roles are added, asked to leave and started again."""

import os
import signal
import threading
from dataclasses import replace

from test_supervisor import READY, WAIT, Run, alive, lines, role, soon

from afd_launch.supervisor import Stage


class FakeOrders:
    """wishes: by name of the role; others have none. absent: roles without a process."""

    def __init__(self, **wishes: str) -> None:
        self.wishes = {name.replace("_", "-"): wish for name, wish in wishes.items()}
        self.given_up: list[str] = []
        self.absent: set[str] = set()

    def wish(self, name, group):
        (self.absent.discard if group else self.absent.add)(name)
        return self.wishes.get(name)

    def give_up(self, name):
        self.given_up.append(name)
        self.wishes[name] = "away"


def instances(here, *names, body=READY + WAIT, spare=()):
    return Stage(
        tuple(
            replace(role(here, name, body), holds_requests=True, spare=name in spare)
            for name in names
        ),
        1,
    )


def script(steps):
    """Runs the steps in a thread once all roles are ready, then ends the supervisor."""
    failures = []

    def run():
        try:
            steps()
        except BaseException as error:
            failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    return (lambda: threading.Thread(target=run, daemon=True).start()), failures


def test_an_instance_is_added_and_removed(tmp_path):
    orders = FakeOrders(attention_0="run", attention_1="away")

    def steps():
        assert not lines(tmp_path, "attention-1", "pid")
        orders.wishes["attention-1"] = "run"
        soon(lambda: lines(tmp_path, "attention-1", "ready"), "attention-1 runs")
        orders.wishes["attention-1"] = "leave"
        soon(lambda: lines(tmp_path, "attention-1", "end"), "attention-1 was asked to leave")
        orders.wishes["attention-1"] = "away"
        soon(lambda: "attention-1" in orders.absent, "attention-1 has ended")

    after, failures = script(steps)
    run = Run(
        tmp_path,
        instances(tmp_path, "attention-0", "attention-1", spare=["attention-1"]),
        after=after,
        orders=orders,
    )
    assert failures == [] and run.status == 0
    assert len(lines(tmp_path, "attention-1", "pid")) == 1
    assert len(lines(tmp_path, "attention-0", "pid")) == 1
    assert "attention-1 has left" in run.text and "starting it again" not in run.text


def test_a_restart_counts_as_no_death(tmp_path):
    orders = FakeOrders(attention_0="run")

    def steps():
        for start in (1, 2, 3):
            orders.wishes["attention-0"] = "leave"
            soon(lambda n=start: len(lines(tmp_path, "attention-0", "end")) == n, "it left")
            orders.wishes["attention-0"] = "run"
            soon(lambda n=start: len(lines(tmp_path, "attention-0", "ready")) > n, "it is back")

    after, failures = script(steps)
    run = Run(tmp_path, instances(tmp_path, "attention-0"), after=after, orders=orders, restarts=0)
    assert failures == [] and run.status == 0
    assert len(lines(tmp_path, "attention-0", "pid")) == 4


def test_an_added_instance_that_cannot_start_does_not_end_the_others(tmp_path):
    bad = role(tmp_path, "attention-1", "sys.exit(3)\n")
    orders = FakeOrders(attention_0="run", attention_1="away")
    good = instances(tmp_path, "attention-0").commands[0]

    def steps():
        orders.wishes["attention-1"] = "run"
        soon(lambda: orders.given_up == ["attention-1"], "it is given up")

    after, failures = script(steps)
    run = Run(
        tmp_path,
        Stage((good, replace(bad, holds_requests=True, spare=True)), 1),
        after=after,
        orders=orders,
        restarts=1,
    )
    assert failures == [] and run.status == 0
    assert "it is not started again until it is added again" in run.text
    assert len(lines(tmp_path, "attention-1", "pid")) == 2
    assert len(lines(tmp_path, "attention-0", "pid")) == 1


def test_an_instance_that_does_not_leave_is_killed(tmp_path):
    orders = FakeOrders(attention_0="run")
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + WAIT

    def steps():
        orders.wishes["attention-0"] = "away"
        pid = lines(tmp_path, "attention-0", "pid")[0]
        soon(lambda: not alive(pid), "it was killed")

    after, failures = script(steps)
    run = Run(
        tmp_path,
        instances(tmp_path, "attention-0", body=deaf),
        after=after,
        orders=orders,
        leave_s=0.5,
    )
    assert failures == [] and run.status == 0
    assert "attention-0 has not left within 0.5 s; killing it" in run.text


def test_an_added_ffn_instance_that_cannot_start_does_not_end_the_others(tmp_path):
    bad = replace(role(tmp_path, "ffn-1", "sys.exit(3)\n"), stateless=True, spare=True)
    orders = FakeOrders(attention_0="run", ffn_1="away")

    def steps():
        orders.wishes["ffn-1"] = "run"
        soon(lambda: orders.given_up == ["ffn-1"], "it is given up")

    after, failures = script(steps)
    good = instances(tmp_path, "attention-0").commands[0]
    stage = Stage((good, bad), 1)
    run = Run(tmp_path, stage, after=after, orders=orders, restarts=0)
    assert failures == [] and run.status == 0
    assert "it is not started again until it is added again" in run.text
