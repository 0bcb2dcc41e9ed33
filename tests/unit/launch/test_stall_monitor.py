"""Which roles count as stalled: only time counts in which the control plane misses them."""

import os
import socket
from itertools import pairwise
from random import Random

from control_support import CONTRACT, FAST, KEYS, control_client, control_server, eventually

from afd.config.deployment import Deployment
from afd.control import messages as m
from afd.control import operator
from afd.control.client import ControlClient
from afd_launch.readiness import FRESH_S, Readiness
from afd_launch.roles_of_host import Ports, role_specs
from afd_launch.stall_monitor import LOOK_S, RETURN_S, StallMonitor

NAMES = ("ffn-0", "ffn-1")


class Watched:
    """A stall monitor with a fake clock. member: whether ffn-0 is a member; None if unknown."""

    def __init__(self) -> None:
        self.member: bool | None = True
        self.now = 1000.0
        self.monitor = StallMonitor(lambda name: self.member if name == "ffn-0" else True)

    def over(self, seconds: float, step: float = 0.1, names=NAMES) -> list[float]:
        """Lets time pass; returns the seconds from now at which ffn-0 was reported as stalled."""
        told, began = [], self.now
        while self.now < began + seconds - step / 2:
            self.now += step
            for name in self.monitor.stalled(names, self.now):
                assert name == "ffn-0"
                told.append(self.now - began)
        return told


def test_a_role_that_does_not_return_is_reported_once():
    watched = Watched()
    assert watched.over(30) == []
    watched.member = False
    (at,) = watched.over(RETURN_S + 3)
    assert RETURN_S <= at <= RETURN_S + 2 * LOOK_S
    watched.over(1, names=("ffn-1",))  # ffn-0 was ended and is restarting
    watched.member = True
    assert watched.over(30) == []


def test_a_role_that_cannot_be_ended_is_reported_again():
    watched = Watched()
    watched.member = False
    told = watched.over(4 * RETURN_S)
    assert len(told) == 3 and all(b - a >= RETURN_S for a, b in pairwise(told))


def test_a_short_absence_is_forgiven():
    watched = Watched()
    for _ in range(5):
        watched.member = False
        assert watched.over(RETURN_S - 1) == []
        watched.member = True
        assert watched.over(LOOK_S) == []


def test_time_without_an_answer_from_the_control_plane_does_not_count():
    watched = Watched()
    watched.member = False
    assert watched.over(RETURN_S - 1) == []
    watched.member = None
    assert watched.over(60) == []
    watched.member = False
    (at,) = watched.over(RETURN_S + 3)
    assert at >= RETURN_S


def test_a_pause_of_the_supervisor_does_not_count():
    watched = Watched()
    watched.member = False
    assert watched.over(2 * LOOK_S) == []
    watched.now += 60
    (at,) = watched.over(RETURN_S + 3)
    assert at >= RETURN_S - 2 * LOOK_S


def test_reports_equal_a_plain_sum_of_the_time_that_counts():
    """Compares with a plain sum over random histories, checked at random intervals."""
    draw = Random(7)
    for _ in range(200):
        watched, counted = Watched(), None
        watched.over(0.1)
        for _ in range(60):
            watched.member = draw.choice((True, None, False, False, False, False, False, False))
            elapsed = draw.uniform(LOOK_S, 3.0)
            if watched.member is not False:
                counted = None
            elif counted is None:
                counted = 0.0
            else:
                counted += elapsed if elapsed <= 2.0 else 0.0
            told = watched.over(elapsed, step=elapsed)
            assert bool(told) == (counted is not None and counted >= RETURN_S)
            if told:
                counted = None


def test_membership_is_unknown_until_members_had_time_to_return(address, tmp_path):
    keys = tmp_path / "operator.keys"
    KEYS.operator.save(keys)
    control = {"heartbeat_s": FAST.interval_s, "timeout_s": FAST.timeout_s}
    plain = {"model": "m", "ffn": {"instances": 2}, "control": control}
    specs = role_specs(Deployment.from_plain(plain), Ports(1, (2,), address), range(2))

    def member(index: int) -> ControlClient:
        return control_client(address, "ffn", index)

    with Readiness(specs, keys) as readiness, member(0) as stays, member(1) as leaves:
        assert readiness.is_member("ffn-0") is None
        with control_server(address):
            for client in (stays, leaves):
                client.join(deadline_s=5)
            assert readiness.is_member("ffn-0") is None
            took = eventually(lambda: readiness.is_member("ffn-0"), 5)
            assert took > FAST.timeout_s / 2 and readiness.is_member("ffn-1")
            leaves.close()
            eventually(lambda: readiness.is_member("ffn-1") is False, 2)
            assert readiness.is_member("ffn-0")
        seen: list[bool | None] = []

        def known(name: str) -> bool:
            seen.append(readiness.is_member("ffn-0"))
            return readiness.is_member(name) is not None

        eventually(lambda: not known("ffn-1"), FRESH_S + 2)
        with control_server(address):
            assert eventually(lambda: known("ffn-1"), 8) > FAST.timeout_s / 2
            assert readiness.is_member("ffn-0") and not readiness.is_member("ffn-1")
        assert False not in seen


def test_an_attention_role_serves_while_it_is_registered_or_listens(address, tmp_path):
    """Otherwise its engine has ended, unless the deployment drains: then nobody may come back."""
    keys = tmp_path / "operator.keys"
    KEYS.operator.save(keys)
    control = {"heartbeat_s": FAST.interval_s, "timeout_s": FAST.timeout_s}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        specs = role_specs(
            Deployment.from_plain({"model": "m", "control": control}),
            Ports(1, (port,), address),
            range(2),
        )
        with Readiness(specs, keys) as readiness, control_server(address):

            def state() -> bool | None:
                return readiness.is_serving("attention-0")

            with control_client(address, "ffn", 0) as ffn:
                ffn.join(deadline_s=5)
                with control_client(address, "attention", 0) as attention:
                    attention.join(deadline_s=5)
                    eventually(state, 5)
                eventually(lambda: readiness.is_member("attention-0") is False, 5)
                assert state() is True  # it listens
                listener.close()
                assert state() is False
                operator.drain(address, KEYS.operator)
                eventually(lambda: state() is None, 5)
                assert readiness.is_member("attention-0") is False


def test_what_operators_want_of_a_role(address, tmp_path):
    keys = tmp_path / "operator.keys"
    KEYS.operator.save(keys)
    plan = {
        "model": "m",
        "attention": {"max_instances": 2},
        "control": {"heartbeat_s": FAST.interval_s, "timeout_s": FAST.timeout_s},
    }
    specs = role_specs(Deployment.from_plain(plan), Ports(1, (2, 3), address), range(2))
    assert [s.id for s in specs] == [
        "control-0",
        "ffn-0",
        "attention-0",
        "attention-1",
        "gateway-0",
    ]
    group = os.getpgid(0)
    with (
        Readiness(specs, keys) as readiness,
        control_server(address, attention=1, contract=CONTRACT),
        control_client(address, "attention", 0) as first,
        control_client(address, "attention", 1) as second,
        control_client(address, "ffn", 0) as ffn,
    ):
        for client in (first, ffn):
            client.join(deadline_s=5)
            client.set_state("ready")

        def becomes(wish: str | None, name: str, of: int = group) -> None:
            eventually(lambda: readiness.wish(name, of) == wish, 5)

        def want(name: str, wish: m.Wish) -> None:
            operator.set_seat(address, KEYS.operator, member=name, wish=wish)

        assert readiness.wish("attention-0", group) is None  # not known yet
        becomes("run", "attention-0")
        becomes("away", "attention-1", 0)
        becomes("run", "ffn-0")
        assert readiness.wish("gateway-0", group) is None
        want("attention", "run")
        becomes("run", "attention-1", 0)
        second.join(deadline_s=5)
        second.set_state("ready")
        want("attention-0", "restart")
        becomes("leave", "attention-0")
        assert readiness.wish("attention-0", 1) == "run"  # another process has taken its place
        want("attention-0", "drain")
        becomes("run", "attention-0")
        want("attention-0", "run")
        want("attention-1", "remove")
        becomes("leave", "attention-1")
        second.leave()
        becomes("away", "attention-1")
        want("attention", "run")
        becomes("run", "attention-1", 0)
        readiness.give_up("attention-1")
        becomes("away", "attention-1", 0)
        want("ffn-0", "restart")
        becomes("leave", "ffn-0")
