"""The control plane's table of hosts: which ones have come, and why one must not take part. Pure.

The supervisor of every host (`afd serve --host`) reports once a second. A report says what must be
equal on all hosts: versions, the values of the deployment file, the kind of RDMA network.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afd.control import messages as m

_LONGEST = 48


@dataclass(frozen=True)
class HostRules:
    """What the control plane's own host has. names: the hosts of the file. home: its own name.

    settings: see :func:`afd_launch.host_view.settings_of`. versions: package -> version.
    """

    home: str
    names: tuple[str, ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]


NO_HOSTS = HostRules("", (), {}, {})
"""Rules of a deployment whose file names no hosts."""


@dataclass
class _Row:
    """What one host has reported. heard: seconds of the monotonic clock."""

    report: m.HostReport
    heard: float
    fault: str


class HostTable:
    """Not thread-safe: the control server's thread owns it."""

    def __init__(
        self,
        rules: HostRules,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """timeout_s: silence after which a host counts as gone. wall_clock: seconds since 1970."""
        self._rules = rules
        self._timeout_s = timeout_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._rows: dict[str, _Row] = {}
        self._successors: dict[str, tuple[str, float]] = {}  # name -> its second process, since

    def report(self, report: m.HostReport) -> m.Hosts:
        """Notes what a host says of itself; returns the table, and why it must not take part.

        A host that was killed looks alive until its timeout. Its next process waits that long: in
        its own table the host is not there yet.
        """
        waits = self._held_by_another(report)
        objection = self._objection(report)
        if report.name in self._rules.names and not waits:
            self._rows[report.name] = _Row(report, self._clock(), objection or report.fault)
        hosts = [self._state(name) for name in self._rules.names]
        if waits:
            hosts = [m.HostState(h.name) if h.name == report.name else h for h in hosts]
        return m.Hosts(self._wall_clock(), tuple(hosts), objection)

    def _state(self, name: str) -> m.HostState:
        row = self._rows.get(name)
        if row is None:
            return m.HostState(name)
        alive = self._clock() - row.heard <= self._timeout_s
        return m.HostState(name, present=alive and not row.fault, fault=row.fault)

    def _held_by_another(self, report: m.HostReport) -> bool:
        row = self._rows.get(report.name)
        if row is None or row.fault or row.report.process == report.process:
            return False
        return self._clock() - row.heard <= self._timeout_s

    def _is_second(self, report: m.HostReport) -> bool:
        """Whether another process has reported for the host since this one first did."""
        if not self._held_by_another(report):
            return False
        process, since = self._successors.get(report.name, ("", 0.0))
        if process != report.process:
            self._successors[report.name] = (report.process, self._clock())
            return False
        return self._rows[report.name].heard > since

    def _objection(self, report: m.HostReport) -> str:
        """Returns one sentence with cause and remedy; "" if the host may take part."""
        rules, name = self._rules, report.name
        if name not in rules.names:
            known = ", ".join(rules.names) or "no hosts"
            return f"host {name} is unknown on host {rules.home}, whose file has {known}; {_SAME}"
        if self._is_second(report):
            holder = self._rows[name].report
            return (
                f"host {name} is already run by afd serve on {holder.machine} (pid {holder.pid});"
                " stop one of the two"
            )
        for package, version in sorted(rules.versions.items()):
            theirs = report.versions.get(package, "none")
            if theirs != version:
                return (
                    f"host {name} has {package} {theirs}, but host {rules.home} has {version};"
                    " install the same version on every host"
                )
        return _settings_differ(
            name, report.settings, rules.home, rules.settings
        ) or self._rails_differ(report)

    def _rails_differ(self, report: m.HostReport) -> str:
        """Compares with the first other host that has come; ports of one rail connect."""
        for name in self._rules.names:
            row = self._rows.get(name)
            if name != report.name and row is not None and not row.fault:
                return rails_differ(report.name, report.rails, name, row.report.rails)
        return ""


_SAME = "give every host the same deployment file"


def _settings_differ(name: str, text: str, home: str, ours: Mapping[str, Any]) -> str:
    try:
        theirs = json.loads(text)
    except ValueError:
        theirs = None
    if not isinstance(theirs, dict):
        return f"the report of host {name} cannot be read; install the same version on every host"
    wrong = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if not wrong:
        return ""
    key = wrong[0]
    more = f" ({len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
    return (
        f"{key} is {_short(theirs.get(key))} on host {name}, but {_short(ours.get(key))} on host"
        f" {home}{more}; {_SAME}, and the same --set"
    )


def rails_differ(name: str, rails: Sequence[m.Rail], other: str, others: Sequence[m.Rail]) -> str:
    """Returns why the RDMA ports of two hosts cannot connect, with the remedy; "" if they can.

    Port i of one host connects to port i of the other. A host without ports uses tcp.
    """
    for number, (here, there) in enumerate(zip(rails, others, strict=False)):
        pair = f"rail {number}: port {here.port} of host {name} and port {there.port} of {other}"
        if here.link != there.link:
            return (
                f"{pair} are {here.link} and {there.link}; name ports of one network, in the same"
                " order, in ports of both hosts"
            )
        if here.gid != there.gid:
            return (
                f"{pair} have addresses of kind {here.gid} and {there.gid}; set"
                " transport.verbs.gid_index to one of the same kind (afd doctor lists them)"
            )
        if here.mtu != there.mtu:
            return (
                f"{pair} have MTU {here.mtu} and {there.mtu}; set one MTU on both interfaces and"
                " the switches between them (ip link set dev INTERFACE mtu BYTES)"
            )
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
