"""The client's end of the control plane: one DEALER socket and its handshake monitor.

Not thread-safe: the thread that uses a Channel owns it.
"""

from __future__ import annotations

import errno
import math
import os
import time
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from afd.control import messages as m
from afd.control.address import to_connect
from afd.control.keys import ClientKeys
from afd.control.probes import probe_peer
from afd.errors import ConfigError

_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_REOPEN_S = 1.0
_CUT_OFFS_ARE_FINAL = 3  # a restarting server may cut off one handshake, hardly three
_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_SEND_HWM = 16  # messages that wait for the server; it reads several heartbeats per second
_RECEIVE_HWM = 64  # snapshots that wait for this thread

_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True)
class Received:
    """Result of one :meth:`Channel.poll`. connected: a connection was just made."""

    messages: tuple[m.FromServer, ...]
    connected: bool


class Channel:
    """A connection to the control server that reconnects by itself.

    fault: why the last handshake failed, None if it did not. fault_is_final: trying again cannot
    help.

    Args:
        identity: unique per process and unguessable; the same over reconnects.

    Raises:
        ConfigError: the address is malformed.
    """

    def __init__(self, address: str, keys: ClientKeys, identity: bytes) -> None:
        self._endpoint = str(to_connect(address))
        self._keys = keys
        self._identity = identity
        self._context = zmq.Context()
        self._cut_offs = 0
        self._reopen_at: float | None = None
        self.fault: str | None = None
        self.fault_is_final = False
        self._open()

    def send(self, message: m.ToServer) -> bool:
        """Sends a message now; False without a connection (nothing is queued)."""
        try:
            self._socket.send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float, wake_fd: int | None = None) -> Received:
        """Waits for messages, connection events or ``wake_fd``, which it then empties."""
        if self._reopen_at is not None and time.monotonic() >= self._reopen_at:
            self._close_sockets(linger_ms=0)
            self._open()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if wake_fd is not None:
            poller.register(wake_fd, zmq.POLLIN)
        ready = dict(poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if wake_fd is not None and wake_fd in ready:
            os.read(wake_fd, 4096)
        connected = self._follow_handshakes()
        return Received(self._drain(), connected)

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the sockets; waits at most ``linger_s`` for the last messages to be sent."""
        self._close_sockets(linger_ms=int(linger_s * 1000))
        self._context.term()

    def _open(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, self._identity)
        # Without a connection nothing is queued, so heartbeats do not arrive in a burst later.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.IPV6, int("[" in self._endpoint))
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        probe_peer(dealer)
        dealer.setsockopt(zmq.SNDHWM, _SEND_HWM)
        dealer.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        dealer.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES)
        dealer.curve_serverkey = self._keys.server_public.encode("ascii")
        dealer.curve_publickey = self._keys.client_public.encode("ascii")
        dealer.curve_secretkey = self._keys.client_secret.encode("ascii")
        self._socket = dealer
        self._monitor = dealer.get_monitor_socket(_WATCHED)
        self._reopen_at = None
        try:
            dealer.connect(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot connect to {self._endpoint}: {error.strerror}; check control.address"
            ) from error

    def _close_sockets(self, *, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _drain(self) -> tuple[m.FromServer, ...]:
        messages: list[m.FromServer] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return tuple(messages)
            try:
                messages.append(m.decode_from_server(frame))
            except m.Malformed as error:
                self._fail(f"the server's reply cannot be read ({error}); "
                           "install the same version of afd everywhere", final=True)  # fmt: skip

    def _follow_handshakes(self) -> bool:
        connected = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            kind, value = int(event["event"]), int(event["value"])
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.fault, self.fault_is_final, self._cut_offs = None, False, 0
                connected = True
                continue
            self._cut_offs += kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            text, final = _explain(kind, value, self._cut_offs)
            self._fail(text, final=final)
            if kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # ZeroMQ does not retry such a connection; a new socket does.
                self._reopen_at = time.monotonic() + _REOPEN_S
        return connected

    def _fail(self, text: str, *, final: bool) -> None:
        self.fault, self.fault_is_final = text, final


def _explain(kind: int, value: int, cut_offs: int) -> tuple[str, bool]:
    """Returns the reason of a failed handshake, and whether trying again cannot help."""
    same = "give every role the same control.keys file"
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"the server does not accept our client key: the keys differ; {same}", True
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
        return "the server has no keys, so it is no control plane; check control.address", True
    if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        cause = os.strerror(value) if value not in (0, errno.EPIPE) else "connection closed"
        text = f"the handshake was cut off ({cause}): the keys may differ; {same}"
        return text, cut_offs >= _CUT_OFFS_ARE_FINAL
    return f"the handshake failed (protocol error {value:#x}): the keys may differ; {same}", True
