"""The other hosts of a deployment, as the supervisor of one host sees them.

It reports to the control plane once a second and gets the table of hosts back. Roles start once
every host is there, so that a bad set-up shows before any weights are loaded.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from afd.config.deployment import Deployment
from afd.control.channel import Channel
from afd.control.hosts import host_name
from afd.control.keys import ClientKeys
from afd.control.messages import HostReport, Hosts, Rail, Refused
from afd.errors import ConfigError
from afd.topology import member_id
from afd_launch.host_view import control_host, find_host, settings_of
from afd_launch.versions import installed_versions

REPORT_S = 1.0
_CONNECT_S = 2.0


def roles_of(deployment: Deployment) -> dict[str, str]:
    """Returns host -> its roles for messages: "attention-1, ffn-1"."""
    leads = control_host(deployment).name
    found = {}
    for place in deployment.places():
        names = ["control plane"] if place.name == leads else []
        names += [member_id("attention", i) for i in place.attention]
        names += [member_id("ffn", j) for j in place.ffn]
        short = names if len(names) <= 6 else [*names[:3], f"{len(names) - 3} more"]
        found[place.name] = ", ".join(short)
    return found


@dataclass(frozen=True)
class Clocks:
    """Three readings in seconds: ours when we asked, the control plane's, ours at the reply."""

    asked: float
    there: float
    answered: float

    @property
    def ahead_s(self) -> float:
        """How far our clock is ahead; exact to half of the time between question and answer."""
        return (self.asked + self.answered) / 2 - self.there

    def objection(self, name: str, home: str, limit_s: float) -> str:
        """Why clocks that differ so much cannot be used; "" if they can."""
        doubt_s = (self.answered - self.asked) / 2
        if abs(self.ahead_s) - doubt_s <= limit_s:
            return ""
        word = "ahead of" if self.ahead_s > 0 else "behind"
        return (
            f"the clock of host {name} is {abs(self.ahead_s):.1f} s {word} the one of host {home};"
            " synchronise the clocks (chronyc makestep), or raise control.clock_s"
        )


class OtherHosts:
    """One thread uses it; close it after use."""

    def __init__(
        self,
        deployment: Deployment,
        name: str,
        address: str,
        keys: ClientKeys,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """deployment: as read from the file. name: of this host. address: of the control plane."""
        self._deployment = deployment
        self._name = name
        self._report = HostReport(
            name,
            uuid.uuid4().hex,
            host_name(),
            os.getpid(),
            installed_versions(),
            json.dumps(settings_of(deployment)),
        )
        self._home = control_host(deployment)
        self._address = address
        self._keys = keys
        self._clock, self._wall_clock = clock, wall_clock
        self._roles: Mapping[str, str] = roles_of(deployment)
        self._channel = Channel(address, keys, uuid.uuid4().hex.encode("ascii"))
        self._asked = self._asked_wall = self._heard = float("-inf")
        self._open = False  # a report is under way
        self._table: Hosts | None = None
        self.limit_s = deployment.deadlines.hosts_s

    def close(self) -> None:
        self._channel.close()

    def rails(self, rails: tuple[Rail, ...]) -> None:
        """Names the RDMA ports that this host uses, before the first report."""
        self._report = msgspec.structs.replace(self._report, rails=rails)

    def turn(self) -> None:
        """Reports when it is time and reads what came; does not block.

        Raises:
            ConfigError: this host must not take part; one sentence.
        """
        now = self._clock()
        for message in self._channel.poll(0).messages:
            if isinstance(message, Refused):
                raise ConfigError(f"host {self._name}: {message.reason}")
            if isinstance(message, Hosts):
                self._take(message, now)
        if self._channel.fault is not None and self._channel.fault_is_final:
            raise ConfigError(
                f"host {self._name}: control plane at {self._address}: {self._channel.fault}; the"
                f" one here is {self._keys.fingerprint}, and host {self._home.name} prints its own"
                " at its start"
            )
        if now - self._asked >= REPORT_S:
            self._asked, self._asked_wall = now, self._wall_clock()
            self._open = self._channel.send(self._report)

    def tell(self, fault: str) -> None:
        """Lets the other hosts know why this one cannot take part; waits a moment at most."""
        if self._table is None and self._name == self._home.name:
            return  # its control plane does not run
        self._report = msgspec.structs.replace(self._report, fault=fault[:4000])
        end = time.monotonic() + _CONNECT_S
        while time.monotonic() < end and not self._channel.send(self._report):
            self._channel.poll(0.1)
        self._channel.poll(0.2)

    def missing(self) -> dict[str, str]:
        """Returns the hosts that are not there: name -> what is known, "" if nothing is.

        Without a recent answer of the control plane, this is its host.
        """
        recent = self._clock() - self._heard <= 2 * self._deployment.control.timeout_s
        if self._table is None or not recent:
            return {self._home.name: ""}
        return {host.name: host.fault for host in self._table.hosts if not host.present}

    def waiting_for(self) -> str | None:
        """Returns what is missing: ``host b (attention-1, ffn-1)``; None if every host is there."""
        found = [
            f"host {name} ({self._roles[name]})" + (f", which stopped: {fault}" if fault else "")
            for name, fault in self.missing().items()
        ]
        return "; ".join(found) or None

    def lacks_needed(self) -> bool:
        """Whether a host is missing without which no request is answered."""
        away = self.missing()
        runs_ffn = any(place.ffn and place.name in away for place in self._deployment.places())
        return runs_ffn or self._home.name in away

    def never_came(self) -> str:
        """One sentence for the user after ``limit_s`` seconds."""
        name, fault = next(iter(self.missing().items()), (self._home.name, ""))
        after = f"within {self.limit_s:g} s (deadlines.hosts_s)"
        if fault:
            return f"host {name} did not come {after}: {fault}"
        remedy = (
            f"start `afd serve FILE --host {name}` on {find_host(self._deployment, name).address}"
        )
        if name == self._home.name and name != self._name:
            return (
                f"the control plane of host {name} did not answer at {self._address} {after};"
                f" {remedy}, and check that no firewall blocks this port"
            )
        return f"host {name} ({self._roles[name]}) did not come {after}; {remedy}, or see its log"

    def _take(self, table: Hosts, now: float) -> None:
        self._table, self._heard = table, now
        if self._open:
            self._open = False
            clocks = Clocks(self._asked_wall, table.clock, self._wall_clock())
            limit_s = self._deployment.control.clock_s
            objection = table.objection or clocks.objection(self._name, self._home.name, limit_s)
            if objection:
                raise ConfigError(objection)
