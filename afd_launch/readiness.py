"""Whether the roles that `afd serve` started are ready.

The control plane is ready when its port accepts connections; an FFN or attention instance when it
is a member in state "ready" and its process belongs to the group that we started; a gateway process
when it is such a member and /health returns 200; a prefill instance when /health returns 200.
"""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from afd.config.roles import RoleSpec
from afd.control.address import to_connect
from afd.control.keys import load_client
from afd.control.messages import Member, Members, SetSeat, Status
from afd.host.ports import accepts, refuses
from afd.topology import member_id
from afd_launch.orders import RoleWish

if TYPE_CHECKING:
    from afd.control.channel import Channel

ASK_S = 0.2  # between two status requests
ANSWER_S = 0.05  # longest wait for a reply, so that the supervisor's loop stays responsive
FRESH_S = 2.0  # an older reply is not used
HEALTH_S = 1.0


def _any_certificate() -> ssl.SSLContext:
    """The gateway's certificate is for its public name, and only its status is read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_any_certificate())
)
"""http_proxy does not apply to this deployment's own addresses."""


class Readiness:
    """Asks the control plane for the members. One thread uses it; close it after use."""

    def __init__(self, specs: Sequence[RoleSpec], keys: Path) -> None:
        """keys: file with the operators' keys."""
        self._specs = {spec.id: spec for spec in specs}
        self._keys = load_client(keys)
        self._control = specs[0].control_address
        self._channel: Channel | None = None
        self._members: Members | None = None
        self._asked = self._answered = self._connected = 0.0
        self._timeout_s = specs[0].deployment.control.timeout_s

    def __enter__(self) -> Readiness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def awaited(self, name: str, group: int) -> str | None:
        """See ``afd_launch.supervisor.Awaited``."""
        spec = self._specs[name]
        if spec.role == "control":
            endpoint = to_connect(self._control)
            up = accepts(endpoint.host, endpoint.port)
            return None if up else f"to listen at {self._control}"
        if spec.role == "gateway":
            return _member_wait(self._snapshot(), spec, group) or _gateway_wait(spec)
        if spec.role == "prefill":
            return health_wait(_health_url("http", spec.deployment.prefill.host, spec.api_port))
        return _member_wait(self._snapshot(), spec, group)

    def is_member(self, name: str) -> bool | None:
        """See ``afd_launch.stall_monitor.IsMember``; for FFN and attention roles.

        A restarted control plane has no members at first. Its replies count once this connection
        is older than the time that members get to register again.
        """
        spec, members = self._specs[name], self._snapshot()
        now = time.monotonic()
        if (
            members is None
            or now - self._answered > FRESH_S
            or now - self._connected <= self._timeout_s
        ):
            return None
        return members.find(spec.role, spec.index, spec.rank) is not None

    def is_serving(self, name: str) -> bool | None:
        """Whether an attention role is registered or still listens; see ``is_member`` for None.

        A role that does neither has ended its engine (vLLM on SIGTERM). A stopped process keeps its
        listener. None while the deployment drains: the control plane would refuse a new process.
        """
        member = self.is_member(name)
        if member is not False:
            return member
        if self._members is None or self._members.draining:
            return None
        spec = self._specs[name]
        return not refuses(local_address(spec.deployment.attention.host), spec.api_port)

    def wish(self, name: str, group: int) -> RoleWish | None:
        """See :class:`afd_launch.orders.Orders`. None while :meth:`is_member` says None, too."""
        spec = self._specs[name]
        if spec.role not in ("attention", "ffn") or self.is_member(name) is None:
            return None
        assert self._members is not None
        seat = self._members.seat(name)
        instance = self._members.seat(member_id(spec.role, spec.index))
        if instance is None or (spec.role == "ffn" and instance.wish == "remove"):
            return "away"
        if seat is None:  # a rank of an instance that is to run
            return "run"
        if seat.wish == "restart":
            member = self._members.find(spec.role, spec.index, spec.rank)
            now = member is not None and member.generation == seat.generation
            return "leave" if member is not None and now and _is_of(member, group) else "run"
        return "leave" if seat.wish == "remove" else "run"

    def give_up(self, name: str) -> None:
        if self._channel is not None:
            spec = self._specs[name]
            self._channel.send(SetSeat(member_id(spec.role, spec.index), "remove"))

    def _snapshot(self) -> Members | None:
        """The latest membership; None until the control plane has replied."""
        from afd.control.channel import Channel

        if self._channel is None:
            self._channel = Channel(self._control, self._keys, uuid.uuid4().hex.encode("ascii"))
        now = time.monotonic()
        if now - self._asked >= ASK_S:
            self._asked = now
            self._channel.send(Status())
            received = self._channel.poll(ANSWER_S)
            if received.connected:
                self._connected = now
            for message in received.messages:
                if isinstance(message, Members):
                    self._members, self._answered = message, now
        return self._members


def _member_wait(members: Members | None, spec: RoleSpec, group: int) -> str | None:
    if members is None:
        return "for the control plane to reply"
    member = members.find(spec.role, spec.index, spec.rank)
    if member is None or not _is_of(member, group):
        return "to join the control plane"
    return None if member.state == "ready" else f"to be ready (it is {member.state})"


def _is_of(member: Member, group: int) -> bool:
    """Whether the member's process belongs to this process group."""
    try:
        return os.getpgid(member.pid) == group
    except ProcessLookupError:
        return False


def local_address(host: str) -> str:
    """Returns the address at which this host reaches a server bound to ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _gateway_wait(spec: RoleSpec) -> str | None:
    scheme = "http" if spec.deployment.gateway.tls is None else "https"
    return health_wait(_health_url(scheme, spec.deployment.gateway.host, spec.api_port))


def _health_url(scheme: str, host: str, port: int) -> str:
    host = local_address(host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/health"


def health_wait(url: str) -> str | None:
    """What a server still has to do before ``url`` returns 200; None once it does."""
    try:
        with DIRECT.open(url, timeout=HEALTH_S):
            return None
    except urllib.error.HTTPError as err:
        return f"to answer {url} with 200 (it says {_reason(err) or err.code})"
    except (OSError, ValueError):
        return f"to answer {url}"


def _reason(error: urllib.error.HTTPError) -> str:
    """Returns what a gateway lacks; "" if the answer is not a gateway's."""
    try:
        body = json.load(error)
    except (OSError, ValueError):
        return ""
    return str(body.get("reason") or "") if isinstance(body, dict) else ""
