"""The ways between two hosts that `afd doctor` measures, one after the other."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

import psutil

from afd_comm import VerbsOptions
from afd_launch.rdma import read_ports


@dataclass(frozen=True)
class TcpRail:
    """One address of this host. name: of its interface, or the address. gbits: its speed; None:
    the kernel does not know it."""

    name: str
    address: str
    gbits: float | None


@dataclass(frozen=True)
class Rails:
    """Rail i of one host belongs to rail i of the other.

    ports: RDMA ports, as "device:port". addresses: for TCP; (): those of the ports' interfaces and
    that of the connection to the other host. verbs_host: for the handshake of RDMA; "": that of
    the connection. library: the libibverbs to load.
    """

    ports: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    verbs_host: str = ""
    library: str = "libibverbs.so.1"

    def at(self, here: str) -> Rails:
        """With everything filled in. here: our address of the connection to the other host."""
        addresses = self.addresses
        if not addresses:
            own = interface_addresses()
            known = {port.name: port.interface for port in read_ports()}
            near = [own.get(known.get(_full(port), ""), here) for port in self.ports]
            addresses = tuple(dict.fromkeys((here, *near)))
        return replace(self, addresses=addresses, verbs_host=self.verbs_host or here)

    def tcp(self) -> list[TcpRail]:
        names = {address: name for name, address in interface_addresses().items()}
        speeds = psutil.net_if_stats()
        rails = []
        for address in self.addresses:
            name = names.get(address, "")
            mbits = speeds[name].speed if name in speeds else 0
            rails.append(TcpRail(name or address, address, mbits / 1e3 if mbits > 0 else None))
        return rails

    def rdma_gbits(self, port: str) -> float | None:
        """Line rate of a port; None if sysfs does not know it."""
        rates = {known.name: known.gbits for known in read_ports()}
        return rates.get(_full(port)) or None

    def verbs(self, rail: int | None = None) -> VerbsOptions:
        """Options for one rail, or for all of them together."""
        ports = self.ports if rail is None else self.ports[rail : rail + 1]
        return VerbsOptions(ports=list(ports), host=self.verbs_host, library=self.library)


def interface_addresses() -> dict[str, str]:
    """Interface -> its first IPv4 address."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET:
                found.setdefault(name, one.address)
    return found


def shared_gbits(here: float | None, there: float | None) -> float | None:
    """Speed of a rail whose ends have these; None if neither is known."""
    known = [gbits for gbits in (here, there) if gbits is not None]
    return min(known) if known else None


def _full(port: str) -> str:
    return port if ":" in port else f"{port}:1"
