"""`afd doctor --active` on the CPU: round trips between processes, and over a fake libibverbs."""

import threading
from pathlib import Path

import pytest
from fake_verbs import built_fake

from afd.errors import AfdError, ConfigError
from afd.host.ports import held_ports
from afd_comm import VerbsOptions
from afd_launch import cli, echo


def test_bytes_go_through_another_process_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--active", "--device", "cpu"]) == 0
    assert "slots on cpu     shm: 1 MiB there and back, bytes equal" in capsys.readouterr().out


def test_a_device_without_its_driver_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/opt/rocm").exists():
        pytest.skip("this host has ROCm")
    assert cli.main(["doctor", "--active", "--device", "rocm"]) == 1
    assert "cannot load libamdhip64.so" in capsys.readouterr().out


def test_a_round_trip_between_two_hosts(tmp_path: Path) -> None:
    """Both ends are here; the RDMA device is fake."""
    with built_fake(tmp_path) as fake, held_ports(["127.0.0.1"]) as (port,):
        address = f"127.0.0.1:{port}"
        verbs = VerbsOptions(ports=["fake0"], host="127.0.0.1", library=fake.library)
        far = threading.Thread(target=echo.listen, args=(address, "cpu", verbs), daemon=True)
        far.start()
        for _ in range(200):
            try:
                found = echo.to_host(address, "cpu", verbs)
                break
            except ConnectionRefusedError:
                far.join(0.05)
        far.join(10)
        assert not far.is_alive() and found.backend == "verbs"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="needs --ports, such as --ports mlx5_0:1"):
        cli_error("--peer", "host:1")
    with pytest.raises(ConfigError, match="'host' is no address; use HOST:PORT"):
        cli_error("--peer", "host", "--ports", "mlx5_0:1")


def cli_error(*words: str) -> None:
    from afd_launch.active import active

    arguments = dict(zip(words[::2], words[1::2], strict=True))
    ports = [arguments["--ports"]] if "--ports" in arguments else []
    active("cpu", None, arguments["--peer"], ports, "127.0.0.1")


def test_an_end_that_leaves_is_an_error(tmp_path: Path) -> None:
    empty = (tmp_path / "in").open("w+")
    with pytest.raises(AfdError, match="the other side ended"):
        echo.near(empty, empty, "cpu")
