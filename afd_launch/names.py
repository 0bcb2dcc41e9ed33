"""Resolves host names before anything starts, and gives up on a name server that is silent."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading

from afd.control.address import Endpoint, parse
from afd.errors import ConfigError

LIMIT_S = 10.0


def resolved(host: str, setting: str, limit_s: float = LIMIT_S) -> str:
    """Returns an IP address of ``host``, an IPv4 one if it has any.

    Args:
        setting: the key that names it, for the error.

    Raises:
        ConfigError: it was not resolved within ``limit_s`` seconds, or does not exist.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    answer: queue.Queue[list[str] | OSError] = queue.Queue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
            answer.put([str(entry[4][0]) for entry in ordered])
        except OSError as error:
            answer.put(error)

    # The C library has no deadline of its own. A thread that never returns ends with the process.
    threading.Thread(target=ask, name="afd-resolve", daemon=True).start()
    try:
        found = answer.get(timeout=limit_s)
    except queue.Empty:
        raise ConfigError(
            f"{setting}: the name {host} was not resolved within {limit_s:g} s; use an IP address,"
            " or mend the name server (/etc/resolv.conf)"
        ) from None
    if isinstance(found, OSError) or not found:
        raise ConfigError(
            f"{setting}: the name {host} cannot be resolved; use an IP address, or a name that this"
            " host knows"
        )
    return found[0]


def numeric(address: str, setting: str) -> str:
    """Returns an address of a control plane with its host as an IP address. Raises ConfigError."""
    endpoint = parse(address)
    if endpoint.transport != "tcp" or endpoint.host == "*":
        return address
    return str(Endpoint("tcp", host=resolved(endpoint.host, setting), port=endpoint.port))
