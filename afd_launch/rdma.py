"""The RDMA devices of this host, read from sysfs. Opens no library and no device."""

from __future__ import annotations

import ctypes.util
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
DEVICES = Path("/dev/infiniband")
ENOUGH_LOCKED = 1 << 30
"""Bytes of locked memory that the slots of a large model need; a lower limit gets a note."""


@dataclass(frozen=True)
class Gid:
    """One address of a port. kind: "RoCE v2", "IB/RoCE v1", or "" if the kernel gives none."""

    index: int
    address: str
    kind: str


@dataclass(frozen=True)
class PciPlace:
    """Where a device is on PCIe. address: such as "0000:1b:00.0".

    path: the host bridge, the bridges below it, and the device: ("pci0000:15", "0000:15:01.0", ...)
    numa_node: -1 if it has none.
    """

    address: str = ""
    path: tuple[str, ...] = ("",)
    numa_node: int = -1


def pci_place(device: Path) -> PciPlace:
    """The place of a PCI device, from its folder in sysfs."""
    real = device.resolve()
    first = next((i for i, part in enumerate(real.parts) if part.startswith("pci")), None)
    path = real.parts[first:] if first is not None else (real.name,)
    return PciPlace(real.name, tuple(path), int(_read(real / "numa_node") or -1))


@dataclass(frozen=True)
class RdmaPort:
    """One port. state: the kernel's word, such as ACTIVE or DOWN. link: "InfiniBand" or "Ethernet".

    numa_node: -1 if the device has none. interface: the network interface of a RoCE port, or "".
    mtu: bytes, of that interface; 0 without one. pci: place of the device.
    """

    name: str
    state: str
    link: str
    rate: str
    numa_node: int
    interface: str
    gids: tuple[Gid, ...]
    mtu: int = 0
    pci: PciPlace = PciPlace()

    @property
    def gbits(self) -> float:
        """Gb/s, from a rate such as "400 Gb/sec (4X NDR)"."""
        number = self.rate.partition(" ")[0]
        return float(number) if number.replace(".", "", 1).isdigit() else 0.0

    def gid(self, index: int | None) -> Gid | None:
        """The address that a role uses. index: ``gid_index``; None: auto."""
        if index is None:
            return self.chosen
        return next((gid for gid in self.gids if gid.index == index), None)

    @property
    def chosen(self) -> Gid | None:
        """The address that gid_index auto uses: RoCE v2, over IPv4 if possible."""
        if self.link == "InfiniBand":
            return self.gids[0] if self.gids else None
        usable = [gid for gid in self.gids if gid.kind != "IB/RoCE v1"]
        ipv4 = [gid for gid in usable if gid.address.startswith("0000:0000:0000:0000:0000:ffff:")]
        return next(iter(ipv4 or usable), None)


def read_ports(sysfs: Path = SYSFS) -> tuple[RdmaPort, ...]:
    """Every port of every RDMA device, by name."""
    folder = sysfs / "class" / "infiniband"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(port for device in devices for port in _ports_of(device))


def findings(
    ports: tuple[RdmaPort, ...],
    *,
    library: str | None,
    openable: bool,
    locked_bytes: int,
    peermem: bool,
) -> Iterator[tuple[str, str, str]]:
    """Returns (level, what, text) per line of the report. Pure.

    Args:
        library: file name of libibverbs, None if absent. openable: the device files may be used.
        locked_bytes: RLIMIT_MEMLOCK, -1 for no limit. peermem: nvidia-peermem is loaded.
    """
    if library is None:
        yield (
            "note",
            "libibverbs",
            "absent; RDMA needs it (apt-get install libibverbs1), tcp does not",
        )
    else:
        yield "ok", "libibverbs", library
    if not ports:
        yield "note", "rdma", "no device in /sys/class/infiniband; transport.verbs cannot be used"
        return
    for port in ports:
        yield _describe(port)
    if not openable:
        text = f"{DEVICES}/uverbs* cannot be opened; add the user to its group, or give a container"
        yield "note", "rdma devices", text + f" the device files (--device {DEVICES})"
    if locked_bytes != -1 and locked_bytes < ENOUGH_LOCKED:
        text = f"{locked_bytes // 1024} KiB may be locked; RDMA registers all slots: ulimit -l"
        yield "note", "locked memory", text + " unlimited (systemd: LimitMEMLOCK=infinity)"
    if not peermem:
        text = "nvidia-peermem is not loaded; GPU memory needs dma-buf then (kernel 5.12)"
        yield "note", "gpu direct", text


def look() -> list[tuple[str, str, str]]:
    """The findings of this host."""
    return list(
        findings(
            read_ports(),
            library=ctypes.util.find_library("ibverbs"),
            openable=devices_openable(),
            locked_bytes=locked_bytes(),
            peermem=has_peermem(),
        )
    )


def devices_openable() -> bool:
    """Whether this user may use the RDMA devices."""
    nodes = sorted(DEVICES.glob("uverbs*"))
    return bool(nodes) and all(os.access(n, os.R_OK | os.W_OK) for n in nodes)


def locked_bytes() -> int:
    """How much memory a process may lock; -1 for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def has_peermem(sysfs: Path = SYSFS) -> bool:
    """Whether nvidia-peermem is loaded."""
    return (sysfs / "module" / "nvidia_peermem").is_dir()


def has_dma_buf(release: str | None = None, proc: Path = Path("/proc")) -> bool:
    """Whether NVIDIA's driver can export GPU memory as dma-buf: its open kernel modules, on Linux
    5.12 or later (docs.nvidia.com/cuda/gpudirect-rdma).

    release: of the kernel; None: of the running one.
    """
    release = os.uname().release if release is None else release
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    return numbers >= (5, 12) and "Open Kernel Module" in _read(
        proc / "driver" / "nvidia" / "version"
    )


def _describe(port: RdmaPort) -> tuple[str, str, str]:
    place = f", interface {port.interface}" if port.interface else ""
    node = f", NUMA node {port.numa_node}" if port.numa_node >= 0 else ""
    text = f"{port.state.lower()}, {port.link}, {port.rate}{place}{node}"
    gid = port.chosen
    if port.state != "ACTIVE":
        return "note", port.name, text + "; check its cable and interface (ip link, rdma link)"
    if gid is None:
        return "note", port.name, text + "; no usable address: give its interface an IP address"
    others = [f"{g.index} {g.kind or 'unknown'}" for g in port.gids if g is not gid]
    more = f" (others: {', '.join(others)})" if others else ""
    return "ok", port.name, f"{text}; gid_index {gid.index} {gid.address} {gid.kind}{more}"


def _ports_of(device: Path) -> Iterator[RdmaPort]:
    numbers = sorted((int(p.name) for p in (device / "ports").iterdir()), key=int)
    for number in numbers:
        folder = device / "ports" / str(number)
        gids = tuple(_gids_of(folder))
        interface = _read(folder / "gid_attrs" / "ndevs" / "0")
        mtu = _read(device.parents[1] / "net" / interface / "mtu") if interface else ""
        yield RdmaPort(
            name=f"{device.name}:{number}",
            state=_read(folder / "state").partition(": ")[2],
            link=_read(folder / "link_layer"),
            rate=_read(folder / "rate"),
            numa_node=int(_read(device / "device" / "numa_node") or -1),
            interface=interface,
            gids=gids,
            mtu=int(mtu or 0),
            pci=pci_place(device / "device"),
        )


def _gids_of(folder: Path) -> Iterator[Gid]:
    for path in sorted((folder / "gids").iterdir(), key=lambda p: int(p.name)):
        address = _read(path)
        if address.replace(":", "").strip("0"):
            yield Gid(int(path.name), address, _read(folder / "gid_attrs" / "types" / path.name))


def _read(path: Path) -> str:
    """Returns the file's text; "" if it does not exist or cannot be read (as of an unused GID)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
