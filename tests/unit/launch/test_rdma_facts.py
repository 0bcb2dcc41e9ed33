"""The RDMA facts of `afd doctor`, read from a hand-made sysfs."""

from __future__ import annotations

from pathlib import Path

from afd_launch.rdma import Gid, findings, read_ports

V4 = "0000:0000:0000:0000:0000:ffff:0a09:0001"
LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_port(sysfs: Path, device: str, state: str, link: str, gids: list[tuple[str, str]]) -> None:
    folder = sysfs / "class/infiniband" / device / "ports/1"
    write(folder / "state", state)
    write(folder / "link_layer", link)
    write(folder / "rate", "100 Gb/sec (4X EDR)")
    (folder / "gids").mkdir()
    for i, (address, kind) in enumerate(gids):
        write(folder / "gids" / str(i), address)
        write(folder / "gid_attrs/types" / str(i), kind)
    write(folder / "gid_attrs/ndevs/0", "ens1")
    write(sysfs / "class/infiniband" / device / "device/numa_node", "1")


def test_no_device(tmp_path: Path) -> None:
    assert read_ports(tmp_path) == ()
    levels = list(findings((), library=None, openable=False, locked_bytes=0, peermem=False))
    assert [what for _, what, _ in levels] == ["libibverbs", "rdma"]


def test_addresses_and_the_one_that_is_chosen(tmp_path: Path) -> None:
    gids = [(LOCAL, "IB/RoCE v1"), (LOCAL, "RoCE v2"), (NONE, ""), (V4, "RoCE v2")]
    make_port(tmp_path, "mlx5_1", "4: ACTIVE", "Ethernet", gids)
    make_port(tmp_path, "mlx5_0", "1: DOWN", "Ethernet", [])
    make_port(tmp_path, "ib0", "4: ACTIVE", "InfiniBand", [(LOCAL, "IB/RoCE v1")])
    ib, down, up = read_ports(tmp_path)
    assert [p.name for p in (ib, down, up)] == ["ib0:1", "mlx5_0:1", "mlx5_1:1"]
    assert up.chosen == Gid(3, V4, "RoCE v2") and up.interface == "ens1" and up.numa_node == 1
    assert ib.chosen == Gid(0, LOCAL, "IB/RoCE v1") and down.chosen is None
    lines = list(
        findings((ib, down, up), library="x.so", openable=True, locked_bytes=65536, peermem=True)
    )
    assert [level for level, _, _ in lines] == ["ok", "ok", "note", "ok", "note"]
    assert f"gid_index 3 {V4} RoCE v2 (others: 0 IB/RoCE v1, 1 RoCE v2)" in lines[3][2]
    assert "down" in lines[2][2] and "ulimit -l" in lines[4][2]


def test_a_port_without_address(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", "4: ACTIVE", "Ethernet", [(LOCAL, "IB/RoCE v1")])
    ports = read_ports(tmp_path)
    lines = list(findings(ports, library="x", openable=False, locked_bytes=-1, peermem=False))
    assert [what for _, what, _ in lines] == [
        "libibverbs",
        "mlx5_0:1",
        "rdma devices",
        "gpu direct",
    ]
    assert "give its interface an IP address" in lines[1][2]
