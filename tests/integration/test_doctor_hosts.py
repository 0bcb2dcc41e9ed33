"""`afd doctor --peer` between two network namespaces with two cables, one of them slow; and a
container beside bare metal."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from machines import two_machines, why_not

from afd_launch import two_hosts
from afd_launch.findings import Row
from afd_launch.rails import Rails

_REASON = why_not()
if _REASON is not None:
    pytest.skip(_REASON, allow_module_level=True)

LIMITS = {"tcp_gbits": 0.3, "tcp_us": 1e5}


def test_the_slow_rail_is_the_one_that_is_bad() -> None:
    with two_machines() as (a, b):
        a.ip(
            *["link", "add", "name", "eth1", "type", "veth", "peer", "name", "eth1", "netns"],
            str(b.holder),
        )
        rails = []
        for machine, last in ((a, 1), (b, 2)):
            second = f"10.78.0.{last}"
            machine.ip("address", "add", f"{second}/24", "dev", "eth1")
            machine.ip("link", "set", "eth1", "up")
            rails.append(Rails(addresses=(machine.address, second)))
        limit = "tc qdisc add dev eth1 root tbf rate 200mbit burst 64kb latency 20ms"
        slow = a.argv(*limit.split())
        subprocess.run(slow, check=True, timeout=10)
        address = f"{b.address}:9000"
        ended: list[int] = []

        def far() -> None:
            with b.inside():
                ended.append(two_hosts.listen(address, two_hosts.Host("cpu", rails[1])))

        thread = threading.Thread(target=far, daemon=True)
        thread.start()
        with a.inside():
            found = compared(address, two_hosts.Host("cpu", rails[0], seconds=0.1))
            two_hosts.say_end(address, 0)
        thread.join(10)
        assert ended == [0]
    rows = {name: [r for r in found if r.what == f"tcp {name}"] for name in ("eth0", "eth1")}
    assert [row.level for row in rows["eth0"]] == ["ok", "ok"]
    rate, latency = rows["eth1"]
    assert rate.level == "bad" and latency.level == "ok" and "ethtool" in rate.remedy


def compared(address: str, host: two_hosts.Host) -> tuple[Row, ...]:
    for _ in range(100):
        try:
            return two_hosts.compare_with(address, host, LIMITS, {"tcp"}).rows
        except ConnectionRefusedError:
            threading.Event().wait(0.05)
    raise AssertionError("nobody listens")


@pytest.mark.long
def test_a_container_is_as_fast_as_bare_metal(tmp_path: Path) -> None:
    """The container has a root, a network, processes and IPC of its own."""
    doctor = [sys.executable, "-m", "afd_launch.cli", "doctor", "--active", "--device", "cpu"]
    file = tmp_path / "bare.json"
    bare = subprocess.run([*doctor, "--save", file], capture_output=True, text=True, timeout=120)
    assert bare.returncode == 0, bare.stdout + bare.stderr
    root = tmp_path / "root"
    root.mkdir()
    apart = ["unshare", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"]
    inner = (
        f"mount --rbind / {root} && mount -t proc proc {root}/proc && mount -t tmpfs -o size=64m"
        f" shm {root}/dev/shm && ip link set lo up && exec chroot {root} "
    )

    def contained(*prefix: str) -> subprocess.CompletedProcess[str]:
        words = " ".join(map(str, [*prefix, *doctor, "--against", file]))
        command = [*apart, "bash", "-c", inner + words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    same = contained()
    assert "beside bare metal" in same.stdout, same.stdout + same.stderr
    rows = same.stdout.partition("beside bare metal")[2]
    print(rows)
    for what in ("slots on cpu rate", "all-reduce bus rate", "all-reduce time"):
        assert what in rows
    # 64 MiB of shared memory is what Docker gives; cores are all there.
    assert "/dev/shm MiB" in rows and "--ipc host" in rows and "cores" not in rows
    fewer = contained("taskset", "-c", "0")
    assert fewer.returncode == 1 and "no --cpuset-cpus" in fewer.stdout
