"""The port of the gateway."""

from __future__ import annotations

import errno
import socket

from afd.errors import ConfigError

_BACKLOG = 1024


def bind_port(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a bound socket that does not listen yet; port 0 picks a free port.

    shared: other processes of this user may bind the port too; the kernel spreads connections.

    Raises ConfigError if the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"gateway: {host} is not a host name or address of this machine ({error.strerror});"
            " set gateway.host"
        ) from None
    # One socket, so prefer IPv4: "localhost" is 127.0.0.1.
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    family, kind, proto, _, address = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(_cannot_listen(host, port, error)) from None
    return listener


def bind_listener(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """As ``bind_port``, but listening. Call it before starting anything."""
    return listening(bind_port(host, port, shared=shared))


def listening(listener: socket.socket) -> socket.socket:
    """Makes a bound socket listen; one that listens already is left so. Returns it.

    Raises ConfigError, and closes the socket, if another process listens at the port.
    """
    try:
        listener.listen(
            _BACKLOG
        )  # reserves the port: after bind alone, a second process could bind too
    except OSError as error:
        host, port = listener.getsockname()[:2]
        listener.close()
        raise ConfigError(_cannot_listen(host, port, error)) from None
    listener.setblocking(False)
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"gateway: port {port} on {host} is in use; choose another with gateway.port or stop"
            " the process that holds it"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"gateway: {host} is not an address of this machine; set gateway.host"
    if error.errno == errno.EACCES:
        return (
            f"gateway: port {port} needs privileges that this user lacks; choose a gateway.port"
            " above 1023"
        )
    return f"gateway: cannot listen on port {port} of {host}: {error.strerror}; set gateway.port"
