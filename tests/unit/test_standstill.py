"""Who stands still: time counts only where the control plane says that a role is missing."""

from itertools import pairwise
from random import Random

from control_support import CONTRACT, FAST, eventually

from afd.config import Deployment
from afd.control.client import ControlClient
from afd.control.server import ControlServer
from afd.launch.plan import Ports, role_specs
from afd.launch.readiness import FRESH_S, Readiness
from afd.launch.standstill import LOOK_S, RETURN_S, Standstill

NAMES = ("ffn-0", "ffn-1")


class Watched:
    """A standstill with a clock of its own; ``away``: what the control plane says of ffn-0."""

    def __init__(self) -> None:
        self.member: bool | None = True
        self.now = 1000.0
        self.standstill = Standstill(lambda name: self.member if name == "ffn-0" else True)

    def over(self, seconds: float, step: float = 0.1, names=NAMES) -> list[float]:
        """Times at which ffn-0 was told, from now on."""
        told, began = [], self.now
        while self.now < began + seconds - step / 2:
            self.now += step
            for name in self.standstill.look(names, self.now):
                assert name == "ffn-0"
                told.append(self.now - began)
        return told


def test_a_role_that_does_not_come_back_is_told_once():
    watched = Watched()
    assert watched.over(30) == []
    watched.member = False
    (at,) = watched.over(RETURN_S + 3)
    assert RETURN_S <= at <= RETURN_S + 2 * LOOK_S
    watched.over(1, names=("ffn-1",))  # it was ended, and is on its way back
    watched.member = True
    assert watched.over(30) == []


def test_one_that_cannot_be_ended_is_told_again():
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


def test_time_without_an_answer_of_the_control_plane_does_not_count():
    watched = Watched()
    watched.member = False
    assert watched.over(RETURN_S - 1) == []
    watched.member = None
    assert watched.over(60) == []
    watched.member = False
    (at,) = watched.over(RETURN_S + 3)
    assert at >= RETURN_S


def test_our_own_pause_does_not_count():
    watched = Watched()
    watched.member = False
    assert watched.over(2 * LOOK_S) == []
    watched.now += 60
    (at,) = watched.over(RETURN_S + 3)
    assert at >= RETURN_S - 2 * LOOK_S


def test_nobody_is_told_before_the_sum_of_what_counts():
    """Against the plain sum over a random history, in looks of any distance."""
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


def test_a_control_plane_is_believed_once_its_members_had_time_to_come_back(address):
    control = {"heartbeat_s": FAST.interval_s, "timeout_s": FAST.timeout_s}
    plain = {"model": "m", "ffn": {"instances": 2}, "control": control}
    specs = role_specs(Deployment.from_plain(plain), Ports(1, (2,), address), range(2))

    def member(index: int) -> ControlClient:
        return ControlClient(address, role="ffn", index=index, contract=CONTRACT, timing=FAST)

    with Readiness(specs) as readiness, member(0) as stays, member(1) as leaves:
        assert readiness.is_member("ffn-0") is None
        with ControlServer(address, timing=FAST):
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
        with ControlServer(address, timing=FAST):
            assert eventually(lambda: known("ffn-1"), 8) > FAST.timeout_s / 2
            assert readiness.is_member("ffn-0") and not readiness.is_member("ffn-1")
        assert False not in seen
