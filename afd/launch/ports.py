"""TCP ports: found free before anything is started, so that a clash is one clear error."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

from afd.errors import ConfigError


@contextlib.contextmanager
def held_ports(hosts: Sequence[str]) -> Iterator[list[int]]:
    """One port per host that nobody uses, all different; nobody else gets them meanwhile.

    The ports are bound here, without listening, for as long as the context lasts. A server that
    sets SO_REUSEADDR, as asyncio, ZeroMQ, uvicorn, vLLM and torch's TCPStore do, binds and listens
    beside that, while the kernel gives such a port neither to a bind to port 0 nor to an outgoing
    connection (net/ipv4/inet_connection_sock.c: inet_csk_bind_conflict).

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
    """Raise ConfigError unless ``host:port`` can be listened on; ``setting`` names the remedy."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # as servers do: connections of the last run in TIME_WAIT are no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()  # SO_REUSEADDR lets bind pass beside a listener; listen tells
        except OSError as err:
            raise ConfigError(_refusal(host, port, setting, err)) from None


def _refusal(host: str, port: int, setting: str, err: OSError) -> str:
    if err.errno == 98:  # EADDRINUSE
        return f"port {port} is in use on {host}; stop what listens there, or change {setting}"
    if err.errno == 13:  # EACCES
        return f"port {port} needs privileges; change {setting} to a port of 1024 or above"
    return f"cannot listen on {host}:{port} ({err.strerror}); change {setting}"


def accepts(host: str, port: int, timeout_s: float = 0.2) -> bool:
    """Whether something accepts connections at ``host:port``."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
