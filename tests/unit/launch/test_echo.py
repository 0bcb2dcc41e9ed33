"""`afd doctor --active` on the CPU: round trips between processes, and over a fake libibverbs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_verbs import FakeVerbs, built_fake

from afd.errors import AfdError, ConfigError
from afd.host.ports import held_ports
from afd_launch import cli, echo, host_facts, two_hosts
from afd_launch.findings import Row
from afd_launch.rails import Rails

QUICK = 0.02
"""Seconds of each rate; these tests are not about speed."""


def test_bytes_go_through_another_process_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--active", "--device", "cpu", "--only", "slots"]) == 0
    assert "slots on cpu       shm: 1 MiB there and back, bytes equal" in capsys.readouterr().out


def test_a_device_without_its_driver_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/opt/rocm").exists():
        pytest.skip("this host has ROCm")
    assert cli.main(["doctor", "--active", "--device", "rocm", "--only", "slots"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("bad   slots on rocm") and "cannot load libamdhip64.so" in said


@contextmanager
def far_side(**host: Any) -> Iterator[tuple[str, list[int]]]:
    """A host that listens for one other, in a thread. Yields its address, and its exit status once
    it has ended."""
    with held_ports(["127.0.0.1"]) as (port,):
        address, ended = f"127.0.0.1:{port}", []
        ask = two_hosts.Host("cpu", **host)
        far = threading.Thread(
            target=lambda: ended.append(two_hosts.listen(address, ask)), daemon=True
        )
        far.start()
        yield address, ended
        far.join(10)
        assert not far.is_alive()


def compare(address: str, only: tuple[str, ...] = ("tcp",), **host: Any) -> dict[str, list[Row]]:
    """The lines of a comparison by what they are about."""
    for _ in range(200):
        try:
            ask = two_hosts.Host("cpu", seconds=QUICK, **host)
            found = two_hosts.compare_with(address, ask, {"tcp_us": 1e6, "rdma_us": 1e6}, {*only})
        except ConnectionRefusedError:
            threading.Event().wait(0.05)
            continue
        two_hosts.say_end(address, 3)
        rows: dict[str, list[Row]] = {}
        for row in found.rows:
            rows.setdefault(row.what, []).append(row)
        return rows
    raise AssertionError("nobody listens")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeVerbs]:
    with built_fake(tmp_path_factory.mktemp("verbs")) as built:
        yield built


def test_two_hosts_are_compared_over_tcp_and_each_rdma_port(fake: FakeVerbs) -> None:
    """Both ends are here; the RDMA devices are fake, so that their line rate is not known."""
    rails = Rails(("fake0", "fake1:1"), library=fake.library)
    with far_side(rails=rails) as (address, ended):
        rows = compare(address, ("tcp", "rdma"), rails=rails)
    assert ended == [3], "both hosts end with the same exit status"
    assert {row.level for found in rows.values() for row in found} == {"ok"}
    assert rows["tcp"][0].found.startswith("tcp: 1 MiB there and back, bytes equal")
    assert rows["verbs"][0].found.startswith("verbs: 1 MiB there and back, bytes equal")
    for where in ("tcp lo", "rdma fake0", "rdma fake1:1"):
        rate, latency = rows[where]
        assert "there" in rate.found and "back" in rate.found and "Gb/s" in rate.found
        assert latency.found.startswith("latency ") and latency.expected == "at most 1000000 us"
    assert "exact to" in rows["clock"][0].found and rows["torch"][0].expected == "the same"


def test_a_port_that_is_absent_does_not_stop_the_next_check(fake: FakeVerbs) -> None:
    good = Rails(("fake0", "fake1:1"), library=fake.library)
    with far_side(rails=good) as (address, _):
        bad = Rails(("absent", "fake1:1"), library=fake.library)
        rows = compare(address, ("rdma",), rails=bad)
    assert rows["rdma absent"][0].level == "bad" and "afd doctor" in rows["rdma absent"][0].remedy
    assert [row.level for row in rows["rdma fake1:1"]] == ["ok", "ok"]


def test_other_model_files_are_bad_and_named(
    tiny_models: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_models("qwen3_moe")
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with (tmp_path / "config.json").open("a") as config:
        config.write("\n")
    with far_side(model=model) as (address, _):
        rows = compare(address, (), model=tmp_path, whole_files=True)
    assert rows["model"][0].level == "ok", "the control plane would take it"
    (files,) = rows["model files"]
    assert files.level == "bad" and files.found.endswith("differ: config.json")
    assert "copy these files again" in files.remedy


def test_each_difference_has_a_remedy() -> None:
    near = {
        "afd": "0.1.0",
        "torch": "2.11.0",
        "nvidia driver": "580.1",
        "kernel": "6.1",
        "model": "a",
    }
    far = {"afd": "0.1.0", "torch": "2.12.0", "nvidia driver": "570.9", "kernel": "6.2"}
    rows = {row.what: row for row in host_facts.compared(near, far)}
    assert rows["afd"].level == "ok" and not rows["afd"].remedy
    assert rows["torch"].level == "bad" and rows["torch"].found == "2.11.0 here, 2.12.0 there"
    assert rows["nvidia driver"].remedy == "install the same driver on both hosts"
    assert rows["kernel"].level == "note" and rows["model"].level == "note"
    assert two_hosts.clock_row(5.0, 0.001).remedy.startswith("synchronise the clocks")
    assert two_hosts.clock_row(-0.3, 0.001).level == "ok"


def test_a_host_that_does_not_fit_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--only", "rdma", "--ports", "absent:1"]
    with far_side() as (address, ended):
        for _ in range(200):
            try:
                status = cli.main(["doctor", "--peer", address, *words])
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
    assert status == 1 and ended == [1]
    assert "1 here, 0 there" in capsys.readouterr().out


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="'host' is no address; use HOST:PORT"):
        two_hosts.compare_with("host", two_hosts.Host("cpu"), {}, set())


def test_an_end_that_leaves_is_an_error(tmp_path: Path) -> None:
    empty = (tmp_path / "in").open("w+")
    with pytest.raises(AfdError, match="the other side ended"):
        echo.near(empty, empty, "cpu")
