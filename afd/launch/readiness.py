"""What each role that `afd serve` started still has to do until it serves.

The control plane: its port answers. FFN and attention: they are ready members, with a process of
the group that we started (an earlier run of the same id does not count). The gateway: /health.
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from afd.control.address import to_connect
from afd.control.keys import CurveKeys
from afd.control.messages import Member, Members, Status
from afd.launch.ports import accepts
from afd.roles import RoleSpec

if TYPE_CHECKING:
    from afd.control.channel import Channel

ASK_S = 0.2  # membership is asked for this often
ANSWER_S = 0.05  # longest wait for an answer, so that the supervisor's loop stays quick
FRESH_S = 2.0  # an older answer says nothing about now
HEALTH_S = 1.0
# our own host is never behind the proxy that http_proxy may name
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Readiness:
    """Use from the supervisor's thread only. Close it (or use ``with``) to free the connection."""

    def __init__(self, specs: Sequence[RoleSpec]) -> None:
        self._specs = {spec.id: spec for spec in specs}
        self._keys = _keys(specs[0].keys_file)
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
        """See ``afd.launch.supervisor.Awaited``."""
        spec = self._specs[name]
        if spec.role == "control":
            endpoint = to_connect(self._control)
            up = accepts(endpoint.host, endpoint.port)
            return None if up else f"to listen at {self._control}"
        if spec.role == "gateway":
            return _gateway_wait(spec)
        return _member_wait(self._snapshot(), spec, group)

    def is_member(self, name: str) -> bool | None:
        """See ``afd.launch.standstill.IsMember``; an FFN or attention role.

        A control plane that was started again has no members at first: it is believed once we have
        been connected to it for longer than they may take to come back.
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

    def _snapshot(self) -> Members | None:
        """The newest membership; None while the control plane has not answered yet."""
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
        return "for the control plane to answer"
    member = members.find(spec.role, spec.index, spec.rank)
    if member is None or not _is_of(member, group):
        return "to join the control plane"
    return None if member.state == "ready" else f"to be ready (it is {member.state})"


def _is_of(member: Member, group: int) -> bool:
    """Whether the member runs in a process group that we started."""
    try:
        return os.getpgid(member.pid) == group
    except ProcessLookupError:
        return False


def _gateway_wait(spec: RoleSpec) -> str | None:
    host = spec.deployment.gateway.host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{spec.api_port}/health"
    try:
        with _DIRECT.open(url, timeout=HEALTH_S):
            return None
    except urllib.error.HTTPError as err:
        return f"to answer {url} with 200 (it says {err.code})"
    except (OSError, ValueError):
        return f"to answer {url}"


def _keys(path: Path | None) -> CurveKeys | None:
    return CurveKeys.load(path) if path else None
