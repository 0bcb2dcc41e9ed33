"""`afd doctor --active` on the CPU: round trips between processes, and over a fake libibverbs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_verbs import built_fake

from afd.errors import AfdError, ConfigError
from afd.host.ports import held_ports
from afd_comm import VerbsOptions
from afd_launch import cli, echo, two_hosts


def test_bytes_go_through_another_process_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--active", "--device", "cpu"]) == 0
    assert "slots on cpu     shm: 1 MiB there and back, bytes equal" in capsys.readouterr().out


def test_a_device_without_its_driver_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/opt/rocm").exists():
        pytest.skip("this host has ROCm")
    assert cli.main(["doctor", "--active", "--device", "rocm"]) == 1
    assert "cannot load libamdhip64.so" in capsys.readouterr().out


@contextmanager
def far_side(
    verbs: VerbsOptions | None = None, model: Path | None = None
) -> Iterator[tuple[str, threading.Thread]]:
    """A host that listens for one other, in a thread. Yields its address."""
    with held_ports(["127.0.0.1"]) as (port,):
        address = f"127.0.0.1:{port}"
        ask = (address, "cpu", verbs, model)
        far = threading.Thread(target=two_hosts.listen, args=ask, daemon=True)
        far.start()
        yield address, far


def compare(address: str, far: threading.Thread, **near: Any) -> dict[str, two_hosts.Row]:
    for _ in range(200):
        try:
            rows = two_hosts.compare_with(address, "cpu", **near)
            far.join(10)
            assert not far.is_alive()
            return {row.what: row for row in rows}
        except ConnectionRefusedError:
            far.join(0.05)
    raise AssertionError("nobody listens")


def test_two_hosts_are_compared_over_tcp_and_rdma(tmp_path: Path) -> None:
    """Both ends are here; the RDMA device is fake."""
    with built_fake(tmp_path) as fake:
        verbs = VerbsOptions(ports=["fake0"], host="127.0.0.1", library=fake.library)
        with far_side(verbs) as (address, far):
            rows = compare(address, far, verbs=verbs)
    assert {row.level for row in rows.values()} == {"ok"}
    assert rows["tcp"].found.startswith("tcp: 1 MiB there and back, bytes equal")
    assert rows["verbs"].found.startswith("verbs: 1 MiB there and back, bytes equal")
    assert "exact to" in rows["clock"].found and rows["torch"].expected == "the same"


def test_other_model_files_are_bad(tiny_models: Callable[[str], Path]) -> None:
    with far_side(model=tiny_models("qwen3_moe")) as (address, far):
        rows = compare(address, far, model=tiny_models("deepseek_v2"))
    assert rows["model"].level == "bad" and "copy the checkpoint again" in str(rows["model"])
    assert rows["tcp"].level == "ok"


def test_each_difference_has_a_remedy() -> None:
    near = {
        "afd": "0.1.0",
        "torch": "2.11.0",
        "nvidia driver": "580.1",
        "kernel": "6.1",
        "model": "a",
    }
    far = {"afd": "0.1.0", "torch": "2.12.0", "nvidia driver": "570.9", "kernel": "6.2"}
    rows = {row.what: row for row in two_hosts.compared(near, far)}
    assert rows["afd"].level == "ok" and not rows["afd"].remedy
    assert rows["torch"].level == "bad" and rows["torch"].found == "2.11.0 here, 2.12.0 there"
    assert rows["nvidia driver"].remedy == "install the same driver on both hosts"
    assert rows["kernel"].level == "note" and rows["model"].level == "note"
    assert two_hosts.clock_row(5.0, 0.001).remedy.startswith("synchronise the clocks")
    assert two_hosts.clock_row(-0.3, 0.001).level == "ok"


def test_a_host_that_does_not_fit_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with far_side() as (address, far):
        for _ in range(200):
            try:
                status = cli.main(["doctor", "--peer", address, "--device", "cpu",
                                   "--ports", "absent:1"])  # fmt: skip
                break
            except ConnectionRefusedError:
                far.join(0.05)
    assert status == 1
    assert "the other side has no ports" in capsys.readouterr().out


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="'host' is no address; use HOST:PORT"):
        two_hosts.compare_with("host", "cpu")


def test_an_end_that_leaves_is_an_error(tmp_path: Path) -> None:
    empty = (tmp_path / "in").open("w+")
    with pytest.raises(AfdError, match="the other side ended"):
        echo.near(empty, empty, "cpu")
