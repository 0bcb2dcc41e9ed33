"""Addresses of the control plane: ``tcp://HOST:PORT`` or ``ipc://PATH``."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from afd.errors import ConfigError

_FORM = "write tcp://HOST:PORT (HOST may be * to listen on all interfaces) or ipc://PATH"


@dataclass(frozen=True)
class Endpoint:
    """A parsed address: ``host`` and ``port`` for tcp, ``path`` for ipc."""

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
    """Parses an address; ConfigError if it is malformed."""
    transport, _, rest = address.partition("://")
    if transport == "ipc" and rest:
        return Endpoint("ipc", path=rest)
    host, colon, port = rest.rpartition(":")
    if transport != "tcp" or not colon or not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"control address {address!r} is malformed; {_FORM}")
    if int(port) > 65535:
        raise ConfigError(f"control address {address!r}: port {port} is above 65535; {_FORM}")
    return Endpoint("tcp", host=host.removeprefix("[").removesuffix("]"), port=int(port))


def to_listen(address: str) -> Endpoint:
    """Returns the numeric endpoint to bind.

    It resolves host names, because ZeroMQ binds to numeric addresses and interfaces only.
    """
    endpoint = parse(address)
    if endpoint.transport == "ipc" or endpoint.host == "*":
        return endpoint
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        raise ConfigError(
            f"control address {address!r}: host {endpoint.host!r} cannot be resolved; "
            "use an IP address of this host, or * for all"
        ) from None
    # Prefer IPv4: localhost has both, and clients try IPv4.
    numeric = str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])
    return Endpoint("tcp", host=numeric, port=endpoint.port)


def to_connect(address: str) -> Endpoint:
    """Returns the endpoint to connect to; ConfigError if one can only listen on it."""
    endpoint = parse(address)
    if endpoint.transport == "tcp" and (endpoint.host in ("*", "0.0.0.0", "::")):
        raise ConfigError(
            f"control address {address!r} is for listening only; "
            "members need the name or IP address of the host that runs `afd control`"
        )
    if endpoint.transport == "tcp" and endpoint.port == 0:
        raise ConfigError(
            f"control address {address!r} has port 0, which only the server can use; "
            "give members the port that `afd control` printed"
        )
    return endpoint
