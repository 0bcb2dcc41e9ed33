"""What the supervisor of a host says and does about the other hosts, with a real control plane."""

import time
from pathlib import Path

import pytest

from afd.config.deployment import Deployment
from afd.control.host_table import HostRules
from afd.control.keys import CurveKeys
from afd.control.server import ControlServer
from afd.errors import ConfigError
from afd.host.ports import held_ports
from afd_launch.host_view import settings_of
from afd_launch.host_watch import HostWatch
from afd_launch.other_hosts import Clocks, OtherHosts
from afd_launch.this_host import this_host
from afd_launch.versions import installed_versions

KEYS = CurveKeys.generate()


def deployed(**keys) -> Deployment:
    hosts = [{"name": "a", "address": "127.0.0.1"}, {"name": "b", "address": "127.0.0.2"}]
    sections = {
        "model": "/m",
        "hosts": hosts,
        "attention": {"instances": 2},
        "ffn": {"instances": 2},
        "deadlines": {"hosts_s": 30},
        "control": {"keys": "/k", "heartbeat_s": 0.1, "timeout_s": 0.5},
    }
    return Deployment.from_plain({**sections, **keys})


@pytest.fixture
def address():
    with held_ports(["127.0.0.1"]) as (port,):
        yield f"tcp://127.0.0.1:{port}"


def control(address: str, deployment: Deployment) -> ControlServer:
    rules = HostRules("a", ("a", "b"), settings_of(deployment), installed_versions())
    return ControlServer(address, KEYS, members=(), hosts=rules)


class Side:
    """One host's supervisor, turned by hand."""

    def __init__(self, name: str, address: str, deployment: Deployment, keys=KEYS, **options):
        self.hosts = OtherHosts(deployment, name, address, keys.operator, **options)
        self.said: list[str] = []
        self.watch = HostWatch(self.hosts, self.said.append)

    def until(self, done, what: str, follow: bool = False) -> None:
        end = time.monotonic() + 8
        while not done():
            assert time.monotonic() < end, what
            (self.watch.follow if follow else self.watch.check_start)()
            time.sleep(0.02)


def test_each_side_waits_for_the_other_and_says_for_what(address: str) -> None:
    deployment = deployed()
    b = Side("b", address, deployment)
    b.watch.check_start()
    assert b.hosts.waiting_for() == "host a (control plane, attention-0, ffn-0)"
    with control(address, deployment):
        a = Side("a", address, deployment)
        a.until(lambda: a.hosts.waiting_for() == "host b (attention-1, ffn-1)", "a misses b")
        b.until(lambda: a.watch.check_start() is None and not b.hosts.waiting_for(), "both came")
        a.hosts.close()
        b.until(lambda: b.watch.holds_restarts, "b notices that a has stopped", follow=True)
        assert b.said == ["waiting for host a (control plane, attention-0, ffn-0)"]
        again = Side("a", address, deployment)

        def both_go_on() -> bool:
            b.watch.follow()  # reports too, else it is gone once the new process of a is let in
            return again.hosts.waiting_for() is None and not b.watch.holds_restarts

        again.until(both_go_on, "a is back, and b goes on")
        assert b.said[-1] == "every host is there again"
        again.hosts.close()
    b.hosts.close()


def test_a_host_that_never_comes_is_named(address: str) -> None:
    deployment = deployed(deadlines={"hosts_s": 2})
    with control(address, deployment):
        a = Side("a", address, deployment)
        a.until(lambda: a.hosts.waiting_for() == "host b (attention-1, ffn-1)", "a misses b")
        with pytest.raises(ConfigError) as error:
            a.watch.check_start(2.5)
        a.hosts.close()
    assert str(error.value) == (
        "host b (attention-1, ffn-1) did not come within 2 s (deadlines.hosts_s); start"
        " `afd serve FILE --host b` on 127.0.0.2, or see its log"
    )
    b = Side("b", address, deployment)
    with pytest.raises(ConfigError, match="the control plane of host a did not answer at tcp://"):
        b.watch.check_start(2.5)
    b.hosts.close()


def test_the_reason_why_a_host_stopped_reaches_the_others(address: str) -> None:
    deployment = deployed()
    with control(address, deployment):
        b = Side("b", address, deployment)
        b.watch.failed("host b has 6 usable GPUs, but it needs 8; buy two")
        b.hosts.close()
        a = Side("a", address, deployment)
        why = "host b (attention-1, ffn-1), which stopped: host b has 6 usable GPUs"
        a.until(lambda: why in (a.hosts.waiting_for() or ""), "a knows why")
        with pytest.raises(ConfigError, match=r"host b did not come within 30 s .*: host b has 6"):
            a.watch.check_start(31)
        a.hosts.close()


def test_another_key_and_another_file_are_refused(address: str) -> None:
    deployment = deployed()
    with control(address, deployment):
        other = CurveKeys.generate()
        b = Side("b", address, deployment, other)
        with pytest.raises(ConfigError, match=r"same control.keys file") as error:
            b.until(lambda: False, "b is refused")
        assert other.operator.fingerprint in str(error.value)
        b.hosts.close()
        changed = Side("b", address, deployed(pipeline={"depth": 2}))
        with pytest.raises(ConfigError, match=r"pipeline.depth is 2 on host b, but null on host a"):
            changed.until(lambda: False, "b is refused")
        changed.hosts.close()


def test_a_clock_that_differs_is_refused_at_the_start_only(address: str) -> None:
    deployment = deployed()
    with control(address, deployment):
        b = Side("b", address, deployment, wall_clock=lambda: time.time() - 60)
        with pytest.raises(ConfigError, match=r"clock of host b is (59\.9|60\.0|60\.1) s behind"):
            b.until(lambda: False, "b is refused")
        b.until(lambda: bool(b.said), "b says it", follow=True)
        b.hosts.close()


def test_the_way_to_the_control_plane_does_not_count_as_a_difference() -> None:
    slow = Clocks(100.0, 103.0, 106.0)
    assert slow.ahead_s == 0 and slow.objection("b", "a", 0.1) == ""
    assert Clocks(100.0, 99.0, 104.0).objection("b", "a", 2.0) == ""  # 3 s, but known to 2 s
    assert "5.0 s ahead of the one of host a" in Clocks(105.0, 100.0, 105.0).objection(
        "b", "a", 2.0
    )


def test_which_host_this_machine_is(tmp_path: Path) -> None:
    deployment = deployed()
    assert this_host(deployment, None, lambda address: address == "127.0.0.2") == "b"
    assert this_host(deployment, "a", lambda _: True) == "a"
    assert this_host(Deployment.from_plain({"model": "/m"}), None) == ""
    for local, said in ((True, "a and b have an address"), (False, "none has an address")):
        with pytest.raises(ConfigError, match=rf"2 hosts \(a, b\), of which {said}.*--host NAME"):
            this_host(deployment, None, lambda _, local=local: local)
    with pytest.raises(ConfigError, match=r"host b has the address 127.0.0.2, which is not one of"):
        this_host(deployment, "b", lambda _: False)
    spare = deployed(
        hosts=[
            *deployment.plain()["hosts"],
            {"name": "c", "address": "127.0.0.3", "attention": [], "ffn": []},
        ]
    )
    with pytest.raises(ConfigError, match="host c has nothing to run"):
        this_host(spare, "c", lambda _: True)
