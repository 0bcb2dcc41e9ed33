"""Addresses of the control plane: ``tcp://HOST:PORT`` or ``ipc://PATH``."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from afd.errors import ConfigError

_FORM = "write tcp://HOST:PORT (HOST may be * to listen on all interfaces) or ipc://PATH"


@dataclass(frozen=True)
class Endpoint:
    """A parsed address. ``host`` and ``port`` are for tcp, ``path`` for ipc."""

    transport: str
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.transport == "ipc":
            return f"ipc://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse(address: str) -> Endpoint:
    """Takes an address apart; ConfigError if it has another form."""
    transport, _, rest = address.partition("://")
    if transport == "ipc" and rest:
        return Endpoint("ipc", path=rest)
    host, colon, port = rest.rpartition(":")
    if transport != "tcp" or not colon or not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"control address {address!r} cannot be understood; {_FORM}")
    if int(port) > 65535:
        raise ConfigError(f"control address {address!r}: port {port} is above 65535; {_FORM}")
    return Endpoint("tcp", host=host.removeprefix("[").removesuffix("]"), port=int(port))


def to_listen(address: str) -> tuple[Endpoint, bool]:
    """The numeric endpoint to bind, and whether only this host can reach it.

    A host name is resolved here because ZeroMQ binds to numbers and interfaces only.
    """
    endpoint = parse(address)
    if endpoint.transport == "ipc":
        return endpoint, True
    if endpoint.host == "*":
        return endpoint, False
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        raise ConfigError(
            f"control address {address!r}: host {endpoint.host!r} cannot be resolved; "
            "use an IP address of this host, or * for all"
        ) from None
    # IPv4 first: a name such as localhost has both, and clients try IPv4.
    numeric = str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])
    loopback = ipaddress.ip_address(numeric.partition("%")[0]).is_loopback
    return Endpoint("tcp", host=numeric, port=endpoint.port), loopback


def to_connect(address: str) -> Endpoint:
    """The endpoint a client connects to; ConfigError if it is only good for listening."""
    endpoint = parse(address)
    if endpoint.transport == "tcp" and (endpoint.host in ("*", "0.0.0.0", "::")):
        raise ConfigError(
            f"control address {address!r} is only good for listening; "
            "members need the name or IP address of the host that runs `afd control`"
        )
    if endpoint.transport == "tcp" and endpoint.port == 0:
        raise ConfigError(
            f"control address {address!r} has port 0, which only the server can use; "
            "give members the port that `afd control` printed"
        )
    return endpoint
