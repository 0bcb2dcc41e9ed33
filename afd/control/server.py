"""The control server: a ZeroMQ ROUTER socket around the :class:`Registry`.

CURVE encrypts every connection. A ZAP handler accepts the keys of the deployment's members and
operators only, and ZeroMQ then attaches the key to every message of the connection, by which
:mod:`afd.control.authority` decides. Nothing that arrives ends the server: what cannot be read, is
not allowed or fails is counted, logged at a limited rate and refused.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping

import zmq
from zmq.auth.thread import ThreadAuthenticator

from afd.config.contract import Contract
from afd.control import messages as m
from afd.control.address import Endpoint, to_listen
from afd.control.authority import denial, known_keys
from afd.control.depths import FIXED_DEPTH, DepthPolicy
from afd.control.host_table import NO_HOSTS, HostRules
from afd.control.keys import CurveKeys
from afd.control.probes import probe_peer
from afd.control.refusals import Refusals
from afd.control.registry import Outgoing, Registry
from afd.errors import ConfigError

_RECEIVE_HWM = 8  # messages per connection that wait here; a member sends a few per second
_SEND_HWM = 64  # messages per connection that wait for a member that does not read
_HANDSHAKE_MS = 5000
_BYE_LINGER_MS = 200
_FAREWELL_S = 0.1
_BATCH = 256  # messages handled between two ticks, so that a flood does not delay the tick

_log = logging.getLogger(__name__)


class _KnownKeys:
    """ZAP policy (pyzmq's credentials provider): these public keys may connect."""

    def __init__(self, holders: Mapping[str, str], refusals: Refusals) -> None:
        self._known = frozenset(key.encode("ascii") for key in holders)
        self._refusals = refusals

    def callback(self, domain: str, key: bytes) -> bool:
        if key in self._known:  # both in Z85
            return True
        self._refusals.note("refused a client with an unknown key; its keys file may be outdated")
        return False


class ControlServer:
    """Listens from construction on; serves in :meth:`run` (this thread) or :meth:`start` (another).

    address: the real one, also for port 0.

    Args:
        keys: of the deployment. members: ids of those that may register.
        contract: what attention and FFN members must have; None: what the first one has.
        hosts: what the hosts of the deployment must share. attention, ffn: instances at the start.

    Raises:
        ConfigError: the address is malformed, in use, or not of this host.
    """

    def __init__(
        self,
        address: str,
        keys: CurveKeys,
        *,
        members: Iterable[str],
        contract: Contract | None = None,
        timing: m.Timing | None = None,
        depth: DepthPolicy = FIXED_DEPTH,
        hosts: HostRules = NO_HOSTS,
        attention: int = 0,
        ffn: int = 0,
    ) -> None:
        endpoint = to_listen(address)
        self.registry = Registry(
            timing=timing or m.Timing(),
            expected=contract,
            depth=depth,
            hosts=hosts,
            attention=attention,
            ffn=ffn,
            seal=keys.seal,
        )
        self.refusals = Refusals()
        self._holders = known_keys(keys, members)
        self._tick_s = min(self.registry.timing.interval_s / 2, 0.25)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            "*", credentials_provider=_KnownKeys(self._holders, self.refusals)
        )
        try:
            self._socket = _bind(self._context, endpoint, keys)
        except BaseException:
            self._release()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def members(self) -> m.Members:
        """The current snapshot, with addresses; may be read from any thread."""
        return self.registry.members

    def run(self, stop_event: threading.Event | None = None) -> None:
        """Serves until the event is set or an operator shuts the deployment down; then tells the
        members and frees the address."""
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
            self._discard_input()
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
                routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if frames:
                sender = self._holders.get(str(frames[-1].get("User-Id")))
                payload = b"".join(frame.buffer for frame in frames)
                self._send(self.replies(routing_id.bytes, sender, payload))

    def replies(self, peer: bytes, sender: str | None, payload: bytes) -> list[Outgoing]:
        """Handles one received message; returns what to send. Never raises.

        Args:
            peer: routing id of the connection. sender: whose key it has (see
                :func:`afd.control.authority.denial`).
        """
        try:
            message = m.decode_to_server(payload)
            reason = denial(sender, message, self.registry.holder(peer))
            out = self.registry.handle(peer, message) if reason is None else []
        except m.Malformed as error:
            self.refusals.note(f"refused an unreadable message of {sender}: {error}")
            reason = "the message cannot be read; install the same version of afd everywhere"
            return [Outgoing(peer, m.Refused(reason))]
        except Exception as error:  # the control plane must outlive any message
            self.refusals.note(f"refused a message of {sender} that could not be handled", error)
            reason = "the control plane could not handle the message; see its log"
            return [Outgoing(peer, m.Refused(reason))]
        if reason is not None:
            out = [Outgoing(peer, m.Refused(reason))]
        for answer in out:
            if isinstance(answer.message, m.Refused):
                self.refusals.note(answer.message.reason)
        return out

    def _send(self, out: list[Outgoing]) -> None:
        for outgoing in out:
            try:
                frames = [outgoing.peer, m.encode(outgoing.message)]
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:  # its next heartbeat makes up for the lost message
                _log.debug("a member does not read; one message dropped")
            except zmq.ZMQError as error:  # such as a routing id that is gone
                _log.debug("a message could not be sent: %s", error)

    def _discard_input(self) -> None:
        """Reads what arrives for a moment. Closing a TCP connection with unread data resets it,
        and a reset may discard our last messages on the other side."""
        end = time.monotonic() + _FAREWELL_S
        while (left := end - time.monotonic()) > 0:
            if self._socket.poll(math.ceil(left * 1000)):
                self._socket.recv_multipart()

    def _release(self) -> None:
        self._authenticator.stop()
        self._context.term()


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, keys: CurveKeys
) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPV6, int(":" in endpoint.host))
    router.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
    router.setsockopt(zmq.SNDHWM, _SEND_HWM)
    router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    # A client that reconnects keeps its (secret, random) routing id; its new connection takes over.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    probe_peer(router)
    router.curve_server = True
    router.curve_publickey = keys.server_public.encode("ascii")
    router.curve_secretkey = keys.server_secret.encode("ascii")
    try:
        if endpoint.transport == "ipc" and _answers(endpoint.path):
            raise zmq.ZMQError(errno.EADDRINUSE)  # ZeroMQ would silently replace the socket file
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
