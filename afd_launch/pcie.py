"""Which RDMA ports are near which GPU, from where both are on PCIe. Pure, except ``read_gpus``."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from pathlib import Path

from afd_launch.rdma import SYSFS, PciPlace, RdmaPort, pci_place

MOST_PORTS = 8
_VENDORS = ("0x10de", "0x1002")  # NVIDIA, AMD
# PCI classes: VGA, 3D and display controllers, and processing accelerators (pci_ids.h)
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


class Distance(enum.IntEnum):
    """How far two PCIe devices are apart, in the words of ``nvidia-smi topo -m``."""

    PIX = 0  # below the same switch
    PXB = 1  # several switches in between
    PHB = 2  # the host bridge of a CPU in between
    NODE = 3  # host bridges of the same NUMA node
    SYS = 4  # another NUMA node


def distance(a: PciPlace, b: PciPlace) -> Distance:
    """Returns how far two devices are apart."""
    shared = _shared(a, b)
    if shared >= 2:  # the host bridge and at least one bridge below it
        bridges = len(a.path) + len(b.path) - 2 * shared - 2
        return Distance.PIX if bridges <= 2 else Distance.PXB
    if shared == 1:
        return Distance.PHB
    return Distance.NODE if a.numa_node == b.numa_node >= 0 else Distance.SYS


def _shared(a: PciPlace, b: PciPlace) -> int:
    """Number of bridges, from the host bridge on, that both devices are below."""
    pairs = zip(a.path[:-1], b.path[:-1], strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.path), len(b.path)) - 1)


def usable_ports(ports: Sequence[RdmaPort]) -> tuple[RdmaPort, ...]:
    """Returns the ports that are up and have an address, in rail order.

    Only those of the highest rate: slower ports are for management or storage. Rail order is by
    name, with numbers in their order (mlx5_2 before mlx5_10).
    """
    up = [port for port in ports if port.state == "ACTIVE" and port.chosen is not None]
    most = max((port.gbits for port in up), default=0.0)
    return tuple(sorted((port for port in up if port.gbits == most), key=rail_key))


def rail_key(port: RdmaPort) -> list[str | int]:
    parts = re.split(r"(\d+)", port.name)
    return [int(part) if part.isdigit() else part for part in parts]


def nearest_ports(
    gpus: Sequence[PciPlace], ports: Sequence[RdmaPort]
) -> tuple[tuple[RdmaPort, ...], ...]:
    """Returns the ports of each GPU, in rail order: the nearest ones.

    GPUs that are equally near to the same ports divide them, in order; if there are fewer ports
    than GPUs, they share them in turn. () for every GPU if no port is usable.
    """
    rails = usable_ports(ports)
    if not rails:
        return ((),) * len(gpus)
    near = [_nearest(gpu, rails) for gpu in gpus]
    found = []
    for number, own in enumerate(near):
        sharing = [other for other, set_ in enumerate(near) if set_ == own]
        place, count = sharing.index(number), len(sharing)
        if len(own) >= count:
            share = own[place * len(own) // count : (place + 1) * len(own) // count]
        else:
            share = (own[place % len(own)],)
        found.append(share[:MOST_PORTS])
    return tuple(found)


def _nearest(gpu: PciPlace, rails: Sequence[RdmaPort]) -> tuple[RdmaPort, ...]:
    def key(port: RdmaPort) -> tuple[Distance, int]:
        return distance(gpu, port.pci), -_shared(gpu, port.pci)

    least = min(key(port) for port in rails)
    return tuple(port for port in rails if key(port) == least)


def read_gpus(sysfs: Path = SYSFS) -> tuple[PciPlace, ...]:
    """Every GPU of the host, by PCI address: the order in which CUDA and HIP number equal GPUs."""
    folder = sysfs / "bus" / "pci" / "devices"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(pci_place(device) for device in devices if _is_gpu(device))


def _is_gpu(device: Path) -> bool:
    try:
        vendor = (device / "vendor").read_text().strip()
        kind = (device / "class").read_text().strip()
    except OSError:
        return False
    return vendor in _VENDORS and kind[:6] in _CLASSES


def describe(number: int, gpu: PciPlace, ports: Sequence[RdmaPort]) -> str:
    """Returns the line of ``afd doctor`` for one GPU."""
    node = f", NUMA node {gpu.numa_node}" if gpu.numa_node >= 0 else ""
    if not ports:
        return f"{gpu.address}{node}; no usable RDMA port"
    near = ", ".join(f"{port.name} ({distance(gpu, port.pci).name})" for port in ports)
    return f"{gpu.address}{node}; nearest RDMA ports: {near}"
