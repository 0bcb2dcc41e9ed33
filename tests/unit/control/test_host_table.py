"""The table of hosts: who has come, and which differences between hosts are refused."""

import json
from dataclasses import dataclass

import msgspec
import pytest

from afd.control import messages as m
from afd.control.host_table import HostRules, HostTable

RULES = HostRules(
    "a", ("a", "b"), {"attention.dtype": "float32", "ffn.tp": 1}, {"afd": "0.9", "vllm": "0.26.0"}
)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def table(clock: Clock) -> HostTable:
    return HostTable(RULES, 3.0, clock=clock, wall_clock=lambda: 5000.0)


def report(host: str, **changes: object) -> m.HostReport:
    base = m.HostReport(
        host,
        f"process of {host}",
        f"machine-{host}",
        7,
        dict(RULES.versions),
        json.dumps(dict(RULES.settings)),
    )
    return msgspec.structs.replace(base, **changes)


def present(hosts: m.Hosts) -> dict[str, bool]:
    return {host.name: host.present for host in hosts.hosts}


def test_hosts_come_stay_and_go() -> None:
    clock = Clock()
    hosts = table(clock)
    assert present(hosts.report(report("a"))) == {"a": True, "b": False}
    answer = hosts.report(report("b"))
    assert present(answer) == {"a": True, "b": True}
    assert (answer.clock, answer.objection) == (5000.0, "")
    clock.now += 3.5
    assert present(hosts.report(report("b"))) == {"a": False, "b": True}


def test_a_report_with_a_fault_tells_the_others_why() -> None:
    hosts = table(Clock())
    hosts.report(report("b", fault="it has 6 GPUs"))
    seen = hosts.report(report("a")).hosts[1]
    assert (seen.present, seen.fault) == (False, "it has 6 GPUs")
    assert present(hosts.report(report("b", process="started again")))["b"]


def test_a_host_runs_once() -> None:
    clock = Clock()
    hosts = table(clock)
    hosts.report(report("b"))
    clock.now += 1
    second = hosts.report(report("b", process="other"))
    assert second.objection == "" and not present(second)["b"], "the first one may have died"
    clock.now += 1
    assert present(hosts.report(report("b")))["b"], "the first one must not be displaced"
    second = hosts.report(report("b", process="other"))
    assert "host b is already run by afd serve on machine-b (pid 7); stop" in second.objection


def test_a_host_that_was_killed_comes_back_after_the_timeout() -> None:
    clock = Clock()
    hosts = table(clock)
    hosts.report(report("b"))
    for _ in range(3):
        clock.now += 1
        answer = hosts.report(report("b", process="next"))
        assert answer.objection == "" and not present(answer)["b"]
    clock.now += 1
    assert present(hosts.report(report("b", process="next")))["b"]


@pytest.mark.parametrize(
    "changes,said",
    [
        (
            {"name": "c"},
            "host c is unknown on host a, whose file has a, b; give every host the same",
        ),
        (
            {"versions": {"afd": "0.9", "vllm": "0.28.0"}},
            "host b has vllm 0.28.0, but host a has 0.26.0; install the same version on every host",
        ),
        ({"versions": {"afd": "0.9"}}, "host b has vllm none, but host a has 0.26.0"),
        (
            {"settings": '{"attention.dtype": "bfloat16", "ffn.tp": 1}'},
            'attention.dtype is "bfloat16" on host b, but "float32" on host a; give every host',
        ),
        (
            {"settings": '{"attention.dtype": 1, "x": 2}'},
            'attention.dtype is 1 on host b, but "float32" on host a (2 more differ)',
        ),
        ({"settings": "{"}, "the report of host b cannot be read"),
    ],
)
def test_differences_are_one_sentence(changes: dict[str, object], said: str) -> None:
    hosts = table(Clock())
    hosts.report(report("a"))
    objection = hosts.report(report("b", **changes)).objection
    assert said in objection and ";" in objection
    state = hosts.report(report("a")).hosts[1]
    assert not state.present and state.fault == ("" if "name" in changes else objection)


def rail(port: str = "mlx5_0:1", link: str = "Ethernet", gid: str = "RoCE v2", mtu: int = 4200):
    return m.Rail(port, link, gid, mtu)


@pytest.mark.parametrize(
    "theirs,said",
    [
        (rail(mtu=1500), "have MTU 4200 and 1500; set one MTU on both interfaces and the switches"),
        (rail(gid="IB/RoCE v1"), "have addresses of kind RoCE v2 and IB/RoCE v1; set"),
        (rail(link="InfiniBand"), "are Ethernet and InfiniBand; name ports of one network"),
    ],
)
def test_ports_of_one_rail_must_fit(theirs: m.Rail, said: str) -> None:
    hosts = table(Clock())
    hosts.report(report("a", rails=(rail(), theirs)))
    objection = hosts.report(report("b", rails=(rail("p:1"), rail("q:1")))).objection
    assert (
        objection.startswith("rail 1: port q:1 of host b and port mlx5_0:1 of a")
        and said in objection
    )
    assert hosts.report(report("b", rails=(rail(),))).objection == ""
    assert hosts.report(report("b")).objection == "", "a host without ports uses tcp"
