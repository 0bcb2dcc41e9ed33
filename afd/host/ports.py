"""Finds and checks TCP ports before any role starts, so that a clash is one clear error."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

from afd.errors import ConfigError


@contextlib.contextmanager
def held_ports(hosts: Sequence[str]) -> Iterator[list[int]]:
    """Reserves one free port per host, all different, for as long as the context lasts.

    The ports are bound without listening. A server that sets SO_REUSEADDR (asyncio, ZeroMQ,
    uvicorn, vLLM, torch's TCPStore) can still bind and listen on them. The kernel gives them
    neither to a bind to port 0 nor to an outgoing connection (net/ipv4/inet_connection_sock.c:
    inet_csk_bind_conflict).

    Args:
        hosts: addresses of this machine, one per port.

    Raises:
        ConfigError: a host is not an address of this machine.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for host in hosts:
            held = stack.enter_context(socket.socket(_family(host), socket.SOCK_STREAM))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind((host, 0))
            except OSError as err:
                raise ConfigError(
                    f"cannot listen on {host} ({err.strerror}); use an address of this machine"
                ) from None
            ports.append(int(held.getsockname()[1]))
        yield ports


def check_free(host: str, port: int, setting: str) -> None:
    """Raise ConfigError unless a server can listen on ``host:port``; ``setting``: key to change."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # As servers do, so that connections in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()  # with SO_REUSEADDR only listen detects another listener
        except OSError as err:
            raise ConfigError(_refusal(host, port, setting, err)) from None


def _refusal(host: str, port: int, setting: str, err: OSError) -> str:
    if err.errno == 98:  # EADDRINUSE
        return f"port {port} is in use on {host}; stop that server, or change {setting}"
    if err.errno == 13:  # EACCES
        return f"port {port} needs root privileges; change {setting} to 1024 or above"
    return f"cannot listen on {host}:{port} ({err.strerror}); change {setting}"


def accepts(host: str, port: int, timeout_s: float = 0.2) -> bool:
    """Whether a server accepts connections at ``host:port``."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def refuses(host: str, port: int, timeout_s: float = 0.2) -> bool:
    """Whether the host refuses connections at ``host:port``: no socket listens there.

    The listener of a stopped or busy process accepts connections, or does not reply.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
