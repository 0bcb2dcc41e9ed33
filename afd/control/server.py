"""The control server: a ZeroMQ ROUTER socket around the :class:`Registry`.

With keys, CURVE encrypts every connection and a ZAP handler lets in the deployment's client key
only. Without keys it listens on loopback or ipc addresses and nowhere else.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
import time

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from afd.control import messages as m
from afd.control.address import Endpoint, to_listen
from afd.control.contract import Contract
from afd.control.depths import FIXED_DEPTH, DepthPolicy
from afd.control.keys import CurveKeys
from afd.control.registry import Outgoing, Registry
from afd.errors import ConfigError

_MAX_MESSAGE_BYTES = 1 << 20
_BYE_LINGER_MS = 200
_SETTLE_S = 0.1
_BATCH = 256  # messages handled between two ticks, so that a flood cannot stop the tick

_log = logging.getLogger(__name__)


class _OneKey:
    """ZAP policy: exactly one client key may connect (pyzmq's credentials provider)."""

    def __init__(self, client_public: str) -> None:
        self._allowed = client_public.encode("ascii")

    def callback(self, domain: str, key: bytes) -> bool:
        if key == self._allowed:  # both in Z85
            return True
        _log.warning("turned away a client with another CURVE key; its keys file may be outdated")
        return False


class ControlServer:
    """Listens from construction on, serves in :meth:`run` (this thread) or :meth:`start` (its own).

    ``address`` is the real one, also for port 0. Raises ConfigError if the address is not usable:
    malformed, in use, not of this host, or reachable from other hosts while there are no keys.
    """

    def __init__(
        self,
        address: str,
        keys: CurveKeys | None = None,
        *,
        contract: Contract | None = None,
        timing: m.Timing | None = None,
        depth: DepthPolicy = FIXED_DEPTH,
    ) -> None:
        endpoint, local = to_listen(address)
        if keys is None and not local:
            raise ConfigError(
                f"{address} can be reached from other hosts but the control plane has no keys; "
                "set control.keys: FILE, made by `afd keys FILE`"
            )
        self.registry = Registry(timing=timing or m.Timing(), expected=contract, depth=depth)
        self._tick_s = min(self.registry.timing.interval_s / 2, 0.25)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        self._authenticator = _start_authenticator(self._context, keys)
        try:
            self._socket = _bind(self._context, endpoint, keys)
        except BaseException:
            self._release()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def members(self) -> m.Members:
        """The current snapshot; may be read from any thread."""
        return self.registry.members

    def run(self, stop_event: threading.Event | None = None) -> None:
        """Serves until the event is set or an operator shuts the deployment down; then says
        goodbye to the members and frees the address."""
        stop = stop_event or self._stop
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        next_tick = time.monotonic()
        try:
            while not stop.is_set() and not self.registry.stopping:
                poller.poll(max(0, math.ceil((next_tick - time.monotonic()) * 1000)))
                self._receive()
                if time.monotonic() >= next_tick:
                    self._send(self.registry.tick())
                    next_tick = time.monotonic() + self._tick_s
            if not self.registry.stopping:
                self._send(self.registry.closing(stop_members=False))
            self._settle()
        finally:
            self._socket.close(linger=_BYE_LINGER_MS)
            self._release()

    def start(self) -> ControlServer:
        """Serves in a thread of its own until :meth:`close`."""
        self._thread = threading.Thread(target=self.run, name="afd-control-server", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops the thread of :meth:`start` (within 2 s) and frees the address."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)
        elif not self._socket.closed:
            self._socket.close(linger=0)
            self._release()

    def __enter__(self) -> ControlServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> None:
        for _ in range(_BATCH):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = m.decode_to_server(b"".join(frames))
            except msgspec.DecodeError as error:
                _log.warning("unreadable message: %s", error)
                reason = "the message cannot be read; install the same version of afd everywhere"
                self._send([Outgoing(peer, m.Refused(reason))])
            else:
                self._send(self.registry.handle(peer, message))

    def _send(self, out: list[Outgoing]) -> None:
        for outgoing in out:
            try:
                frames = [outgoing.peer, m.encode(outgoing.message)]
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:  # a peer that does not read; its next heartbeat asks for what it lost
                _log.debug("a member does not read; one message dropped")

    def _settle(self) -> None:
        """Reads what still comes for a moment, unanswered. A TCP connection that is closed with
        unread data is reset, and a reset may discard our last words on the other side."""
        end = time.monotonic() + _SETTLE_S
        while (left := end - time.monotonic()) > 0:
            if self._socket.poll(math.ceil(left * 1000)):
                self._socket.recv_multipart()

    def _release(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _start_authenticator(
    context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None
) -> ThreadAuthenticator | None:
    if keys is None:
        return None
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=_OneKey(keys.client_public))
    return authenticator


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, keys: CurveKeys | None
) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPV6, int(":" in endpoint.host))
    router.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    # A client that reconnects keeps its routing id; its new connection takes over.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    # Finds half-open TCP connections (a host that vanished) below our own heartbeats.
    router.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
    if keys is not None:
        router.curve_server = True
        router.curve_publickey = keys.server_public.encode("ascii")
        router.curve_secretkey = keys.server_secret.encode("ascii")
    try:
        if endpoint.transport == "ipc" and _answers(endpoint.path):
            raise zmq.ZMQError(errno.EADDRINUSE)  # ZeroMQ would silently take the path over
        router.bind(str(endpoint))
        if endpoint.transport == "ipc":
            os.chmod(endpoint.path, 0o600)
    except zmq.ZMQError as error:
        router.close(linger=0)
        raise ConfigError(_bind_failure(endpoint, error)) from error
    return router


def _bind_failure(endpoint: Endpoint, error: zmq.ZMQError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{endpoint} is already in use; stop the other `afd control`, "
                "or choose another address in control.address"
            )
        case errno.EADDRNOTAVAIL | errno.ENODEV:
            return (
                f"{endpoint} is not an address of this host; "
                "set control.address to one that `ip addr` lists, or to tcp://*:PORT"
            )
        case errno.EACCES:
            return f"no permission to listen on {endpoint}; use a port above 1023 or another path"
        case _:
            return f"cannot listen on {endpoint}: {error.strerror}; check control.address"


def _answers(path: str) -> bool:
    """True if a process listens on the Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
