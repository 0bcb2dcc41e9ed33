"""Which addresses belong to this machine."""

from __future__ import annotations

import socket

import psutil


def is_local(address: str) -> bool:
    """Whether an IP address, or a name that resolves to one, is of this machine."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, place in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(place)
                return True
            except OSError:
                continue
    return False


def own_addresses() -> list[str]:
    """Returns the IP addresses of this machine's interfaces, without loopback; for messages."""
    return sorted(
        address.address.partition("%")[0]
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
        and not address.address.startswith(("127.", "::1", "fe80:"))
    )
