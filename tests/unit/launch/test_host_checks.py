"""Bad set-ups of one host, each one sentence at the start; which NIC is near which GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from afd.config.deployment import Deployment
from afd.control.messages import Rail
from afd.errors import ConfigError
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_launch.host_checks import (
    HostFacts,
    check_gpus,
    check_rdma,
    locked_need,
    ports_in_use,
    prepared,
    rails_of,
    with_ports,
)
from afd_launch.host_view import seen_from
from afd_launch.pcie import Distance, describe, distance, nearest_ports, read_gpus, usable_ports
from afd_launch.rdma import Gid, PciPlace, RdmaPort, has_dma_buf, read_ports
from afd_launch.roles_of_host import Ports, role_specs

V2 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a09:0001", "RoCE v2")


def place(*path: str, node: int = 0) -> PciPlace:
    return PciPlace(path[-1], path, node)


def port(name: str, pci: PciPlace, state: str = "ACTIVE", rate: int = 400) -> RdmaPort:
    return RdmaPort(f"{name}:1", state, "Ethernet", f"{rate} Gb/sec", 0, "ens", (V2,), 4200, pci)


def server(pairs: int = 8, per_switch: int = 1) -> tuple[list[PciPlace], list[RdmaPort]]:
    """GPUs and NICs of a server: ``per_switch`` of each below one switch, half of the switches on
    each NUMA node."""
    gpus, ports = [], []
    for number in range(pairs):
        switch = number // per_switch
        node = int(number >= pairs // 2)
        above = (f"pci{switch}", f"root{switch}", f"switch{switch}")
        gpus.append(place(*above, f"down{number}", f"gpu{number}", node=node))
        ports.append(
            port(f"mlx5_{number}", place(*above, f"down{number}n", f"nic{number}", node=node))
        )
    return gpus, ports


# -- distance


def test_distances_are_those_of_nvidia_smi() -> None:
    gpu = place("pci0", "root", "up", "down0", "gpu")
    assert distance(gpu, place("pci0", "root", "up", "down1", "nic")) == Distance.PIX
    assert distance(gpu, place("pci0", "root", "other", "x", "y", "nic")) == Distance.PXB
    assert distance(gpu, place("pci0", "root2", "nic")) == Distance.PHB
    assert distance(gpu, place("pci1", "root", "nic")) == Distance.NODE
    assert distance(gpu, place("pci1", "root", "nic", node=1)) == Distance.SYS
    unknown = replace(gpu, numa_node=-1)
    assert distance(unknown, place("pci1", "root", "nic", node=-1)) == Distance.SYS


def test_every_gpu_gets_the_nic_of_its_switch() -> None:
    gpus, ports = server()
    shuffled = [ports[i] for i in (7, 2, 0, 5, 1, 3, 6, 4)]
    assert nearest_ports(gpus, shuffled) == tuple((p,) for p in ports)


def test_gpus_of_one_switch_divide_its_nics_or_share_one() -> None:
    gpus, ports = server(per_switch=2)
    assert nearest_ports(gpus, ports) == tuple((p,) for p in ports)
    alone = nearest_ports(gpus, ports[::2])
    assert [p[0].name for p in alone] == [f"mlx5_{i}:1" for i in (0, 0, 2, 2, 4, 4, 6, 6)]
    assert nearest_ports(gpus[:1], ports[:2]) == ((ports[0], ports[1]),)


def test_only_ports_of_the_fast_network_that_are_up() -> None:
    _, ports = server(12)
    down, slow = replace(ports[1], state="DOWN"), replace(ports[2], rate="100 Gb/sec")
    nowhere = replace(ports[3], gids=())
    found = usable_ports([ports[11], ports[10], ports[9], down, slow, nowhere])
    assert [p.name for p in found] == ["mlx5_9:1", "mlx5_10:1", "mlx5_11:1"]
    assert nearest_ports([place("pci0", "gpu")], [down]) == ((),)


def test_gpus_and_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    devices = tmp_path / "devices"
    listed = tmp_path / "bus/pci/devices"
    listed.mkdir(parents=True)
    for where, vendor, kind in (
        ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:1b:00.0", "0x10de", "0x030200"),
        ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:1c:00.0", "0x15b3", "0x020700"),
        ("pci0000:38/0000:38:01.0/0000:3b:00.0", "0x1002", "0x120000"),
        ("pci0000:00/0000:00:02.0", "0x1a03", "0x030000"),
    ):
        folder = devices / where
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
        (folder / "numa_node").write_text("1\n")
        (listed / folder.name).symlink_to(folder)
    nic = tmp_path / "class/infiniband/mlx5_0"
    (nic / "ports/1/gids").mkdir(parents=True)
    (nic / "ports/1/gid_attrs/ndevs").mkdir(parents=True)
    (nic / "ports/1/gid_attrs/ndevs/0").write_text("ens1\n")
    (nic / "ports/1/gids/0").write_text(V2.address + "\n")
    (nic / "ports/1/state").write_text("4: ACTIVE\n")
    (nic / "device").symlink_to(listed / "0000:1c:00.0")
    (tmp_path / "class/net/ens1").mkdir(parents=True)
    (tmp_path / "class/net/ens1/mtu").write_text("9000\n")
    gpus, ports = read_gpus(tmp_path), read_ports(tmp_path)
    assert [gpu.address for gpu in gpus] == ["0000:1b:00.0", "0000:3b:00.0"]
    assert (ports[0].mtu, ports[0].pci.address) == (9000, "0000:1c:00.0")
    near = nearest_ports(gpus, ports)
    assert describe(0, gpus[0], near[0]) == (
        "0000:1b:00.0, NUMA node 1; nearest RDMA ports: mlx5_0:1 (PIX)"
    )
    assert "(NODE)" in describe(1, gpus[1], near[1])
    assert describe(0, gpus[0], ()).endswith("no usable RDMA port")


# -- ports of roles


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3_moe", folder, resolve("qwen3_moe", "tiny"))
    return folder


def roles(model: Path | str, device: str = "cuda", ports: object = "auto", name: str = "b", **keys):
    hosts = [
        {"name": n, "address": f"10.0.0.{i}", "accelerators": {"count": 8}, "ports": ports}
        for i, n in ((1, "a"), (2, "b"))
    ]
    attention = {"instances": 8, "device": device}
    ffn = {"instances": 8, "device": device}
    control = {"keys": "/k"}
    sections = {"model": str(model), "attention": attention, "ffn": ffn, "control": control}
    deployment = Deployment.from_plain({**sections, "hosts": hosts, **keys})
    seen = seen_from(deployment, name)
    return role_specs(seen, Ports(1, (1,) * 8, "tcp://10.0.0.1:5555"), range(4), name)


def facts(**changes) -> HostFacts:
    gpus, ports = server()
    base = HostFacts(8, tuple(gpus), tuple(ports), "libibverbs.so.1", True, -1, True)
    return replace(base, **changes)


def ports_by_role(specs) -> dict[str, tuple[str, ...]]:
    return {spec.id: spec.deployment.transport.verbs.ports for spec in specs}


def test_every_process_gets_the_ports_near_its_gpu() -> None:
    found = ports_by_role(with_ports(roles("/m"), facts(), {}))
    assert [found[f"attention-{i}"] for i in range(4, 8)] == [(f"mlx5_{i}:1",) for i in range(4)]
    assert [found[f"ffn-{j}"] for j in range(4, 8)] == [(f"mlx5_{i}:1",) for i in range(4, 8)]
    allowed = {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"}
    found = ports_by_role(with_ports(roles("/m"), facts(), allowed))
    assert (found["attention-4"], found["ffn-7"]) == (("mlx5_7:1",), ("mlx5_0:1",))


def test_ports_of_the_file_are_not_changed() -> None:
    specs = roles("/m", ports=["mlx5_3:1"])
    assert set(ports_by_role(with_ports(specs, facts(), {})).values()) == {("mlx5_3:1",)}
    given = {"verbs": {"ports": ["mlx5_6"]}}
    assert ports_in_use(with_ports(roles("/m", transport=given), facts(), {})) == ("mlx5_6:1",)
    tcp = with_ports(roles("/m", "cpu", transport={"backend": "tcp"}), facts(), {})
    assert ports_in_use(tcp) == ()


def test_processes_on_cpus_use_all_rails() -> None:
    specs = with_ports(roles("/m", "cpu"), facts(), {})
    assert ports_in_use(specs) == tuple(f"mlx5_{i}:1" for i in range(8))
    assert rails_of(specs, facts())[7] == Rail("mlx5_7:1", "Ethernet", "RoCE v2", 4200)


# -- mistakes


def test_a_good_host_has_nothing_to_say(model: Path) -> None:
    for device in ("cuda", "cpu"):
        specs = with_ports(roles(model, device), facts(), {})
        check_gpus(specs[0].deployment, "b", facts())
        check_rdma(specs, facts())
    without = with_ports(roles(model), facts(ports=()), {})
    check_rdma(without, facts(ports=(), library=None))  # backend auto: tcp


def test_a_host_with_too_few_gpus() -> None:
    deployment = roles("/m")[0].deployment
    with pytest.raises(
        ConfigError, match=r"host b has 6 usable GPUs, but the file gives it 8; look"
    ):
        check_gpus(deployment, "b", facts(gpus=6))
    rocm = roles("/m", "rocm")[0].deployment
    with pytest.raises(ConfigError, match=r"missing ones \(rocminfo, HIP_VISIBLE_DEVICES\), or"):
        check_gpus(rocm, "b", facts(gpus=0))
    check_gpus(deployment, "", facts(gpus=0))
    check_gpus(roles("/m", "cpu")[0].deployment, "b", facts(gpus=0))
    check_gpus(roles("/m", gpus=1)[0].deployment, "b", facts(gpus=8))


@pytest.mark.parametrize(
    "changed,said",
    [
        ({"ports": ()}, "there is no RDMA port mlx5_1:1 (there are: none); correct"),
        ({"down": True}, "RDMA port mlx5_1:1 is down; check its cable"),
        (
            {"gid_index": 5},
            "RDMA port mlx5_1:1 has no address at gid_index 5; give its interface ens",
        ),
        ({"library": None}, "libibverbs is not installed; run: apt-get install libibverbs1"),
        ({"openable": False}, "/dev/infiniband/uverbs* cannot be opened by this user; add"),
        ({"locked_bytes": 65536}, "a process may lock 0 MiB, but RDMA registers"),
    ],
)
def test_rdma_that_cannot_work(model: Path, changed: dict[str, object], said: str) -> None:
    known = facts()
    verbs: dict[str, object] = {}
    if "down" in changed:
        changed = {"ports": (known.ports[0], replace(known.ports[1], state="DOWN"))}
    if "gid_index" in changed:
        verbs, changed = changed, {}
    specs = roles(model, "cpu", ports=["mlx5_1:1"], transport={"verbs": verbs})
    with pytest.raises(ConfigError) as error:
        check_rdma(specs, replace(known, **changed))
    assert said in str(error.value) and str(error.value).startswith("host b: ")


def test_a_libibverbs_of_the_file_s_own_lists_its_ports_itself(model: Path) -> None:
    own = {"verbs": {"library": "/opt/own/libibverbs.so"}}
    specs = roles(model, "cpu", ports=["own0:1"], transport=own)
    assert prepared(specs, replace(facts(), ports=())) == specs
    assert rails_of(specs, facts()) == ()


def test_backend_verbs_needs_a_port_that_is_up() -> None:
    specs = roles("/m", "cpu", transport={"backend": "verbs"})
    with pytest.raises(
        ConfigError, match=r"host b has no RDMA port that is up, but transport\.back"
    ):
        check_rdma(with_ports(specs, facts(ports=()), {}), facts(ports=()))


def test_gpu_memory_that_no_nic_can_reach_is_refused_or_staged(model: Path) -> None:
    """Backend verbs asks for RDMA from GPU memory; auto copies through host memory instead."""
    known = facts(gpu_direct=False)
    specs = roles(model, ports=["mlx5_1:1"], transport={"backend": "verbs"})
    with pytest.raises(ConfigError) as error:
        check_rdma(specs, known)
    said = str(error.value)
    assert said.startswith("host b: GPU memory cannot be registered with a NIC, because nvidia-pee")
    assert "run: modprobe nvidia-peermem, or install" in said
    check_rdma(roles(model, ports=["mlx5_1:1"]), known)
    check_rdma(roles(model, "cpu", ports=["mlx5_1:1"], transport={"backend": "verbs"}), known)


def test_slots_are_locked_once_per_nic(model: Path) -> None:
    specs = roles(model, "cpu")
    assert locked_need(specs, 2) == 2 * locked_need(specs, 1) > 2**20
    assert locked_need(roles(model), 8) == 0  # GPU memory does not count


def test_dma_buf_needs_a_kernel_and_the_open_modules(tmp_path: Path) -> None:
    assert not has_dma_buf("6.8.0-31", tmp_path)
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module")
    assert has_dma_buf("6.8.0-31-generic", tmp_path) and has_dma_buf("5.12.1", tmp_path)
    assert not has_dma_buf("5.4.0", tmp_path)
