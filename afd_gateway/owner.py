"""Connects to upstreams of this host only if this user runs them.

While an attention instance is away, another local user can listen at its port and would get the
next prompts. So before a connection to a loopback address is used, the kernel is asked which user
owns the socket that listens there.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientTimeout
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

log = logging.getLogger("afd.gateway")

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h; see sock_diag(7)
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_ANY_COOKIE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
_REQUEST = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_SOCKET_ID = struct.Struct("!HH16s16s")  # ports and addresses of both ends
_SOCKET_ID_END = struct.Struct("=III")  # interface, cookie
_UID_AT = _HEADER.size + 4 + _SOCKET_ID.size + _SOCKET_ID_END.size + 12


class ForeignListener(aiohttp.ClientConnectionError):
    """Another user listens at the address of an upstream."""


class OwnedConnector(aiohttp.TCPConnector):
    """A connector whose connections to loopback addresses end at listeners of this user.

    Raises ForeignListener before anything is sent.
    """

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        transport = connection.transport
        try:
            check_owner(None if transport is None else transport.get_extra_info("peername"))
        except BaseException:
            connection.close()
            raise
        return connection


def check_owner(peer: tuple[str, int] | None) -> None:
    """Raises ForeignListener if ``peer`` is a loopback address at which another user listens."""
    if peer is not None and is_loopback(peer[0]):
        owner = listener_uid(peer[0], int(peer[1]))
        if owner != os.geteuid():
            whose = "nobody" if owner is None else f"user {owner}"
            raise ForeignListener(f"{whose} listens at port {peer[1]}, not this user")


def can_check_owners() -> bool:
    """Returns whether the kernel tells who listens; warns if it does not."""
    try:
        listener_uid("127.0.0.1", 1)
    except OSError as error:  # a sandbox without NETLINK_SOCK_DIAG
        log.warning("owners of ports are not checked: %s; see SECURITY.md", error)
        return False
    return True


def make_connector(*, own_upstreams: bool) -> aiohttp.TCPConnector:
    """Returns a connector without reuse of connections and without a limit.

    own_upstreams: see GatewaySettings.
    """
    own_upstreams = own_upstreams and can_check_owners()
    kind = OwnedConnector if own_upstreams else aiohttp.TCPConnector
    return kind(limit=0, force_close=True)


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def listener_uid(host: str, port: int) -> int | None:
    """Returns the user whose socket accepts connections to this TCP address of this host.

    None if there is no listener. The kernel looks it up in about 10 us.

    Raises:
        OSError: the kernel cannot be asked.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0")
    body = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        + _SOCKET_ID.pack(port, 0, address, bytes(16))
        + _SOCKET_ID_END.pack(0, _ANY_COOKIE, _ANY_COOKIE)
    )
    length = _HEADER.size + len(body)
    message = _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.sendto(message, (0, 0))
        reply = kernel.recv(8192)
    _, kind, *_ = _HEADER.unpack_from(reply)
    if kind == _NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", reply, _HEADER.size)
        if -code == errno.ENOENT:
            return None
        raise OSError(-code, os.strerror(-code))
    (uid,) = struct.unpack_from("=I", reply, _UID_AT)
    return int(uid)
