"""`afd doctor --listen` and `--peer`: compares two hosts, and moves bytes between them.

The near side connects to the far side. Both send what they are; then the near side asks for the far
clock, and round trips follow over TCP and, where both ends name RDMA ports, over verbs.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from afd.errors import AfdError
from afd_comm import CommError, VerbsOptions
from afd_launch import echo
from afd_launch.versions import installed_versions

Facts = Mapping[str, str]

CLOCK_S = 2.0  # control.clock_s: a larger difference is refused at the start of a deployment
_PINGS = 16
_NVIDIA = Path("/proc/driver/nvidia/version")
_REMEDIES = {
    "model": "copy the checkpoint again; the files differ",
    "nvidia driver": "install the same driver on both hosts",
    "kernel": "no need to act unless RDMA fails; drivers are built per kernel",
    "locked memory": "set the limit as on the other host: LimitMEMLOCK=infinity, or ulimit -l",
    "container": "run both sides in the same way, so that limits and devices are the same",
}
_NOTES = ("kernel", "container")
"""Differences that are worth a look but end nothing."""


@dataclass(frozen=True)
class Row:
    """One comparison. level: ok, note or bad. remedy: "" if it is ok."""

    level: str
    what: str
    found: str
    expected: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.what:16} {self.found:44} expected {self.expected}"
        return f"{line}\n      {'':16} {self.remedy}" if self.remedy else line


def facts_of_this_host(model: Path | None) -> dict[str, str]:
    """What two hosts of a deployment should share. model: a checkpoint; None: not compared.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    found = {
        **installed_versions(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "kernel": platform.release(),
        "locked memory": limit,
        "container": "yes" if _in_container() else "no",
    }
    if _NVIDIA.exists():
        words = _NVIDIA.read_text().splitlines()[0].split("Kernel Module")[-1].split()
        found["nvidia driver"] = next((w for w in words if w[:1].isdigit()), "unknown")
    if model is not None:
        from afd.models.checkpoint import fingerprint

        found["model"] = fingerprint(model)[:16]
    return found


def _in_container() -> bool:
    marks = (Path("/.dockerenv"), Path("/run/.containerenv"))
    return any(mark.exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in os.environ


def compared(near: Facts, far: Facts) -> list[Row]:
    """One row per fact that a side has, by the near side's value. Pure."""
    rows = []
    for what in sorted(near.keys() | far.keys()):
        here, there = near.get(what, "absent"), far.get(what, "absent")
        if what == "model" and "absent" in (here, there):
            rows.append(Row("note", what, "not compared", "the same", "give --model on both sides"))
            continue
        level = "ok" if here == there else "note" if what in _NOTES else "bad"
        remedy = _REMEDIES.get(what, f"install the same {what} on both hosts")
        text = here if here == there else f"{here} here, {there} there"
        rows.append(Row(level, what, text, "the same", "" if level == "ok" else remedy))
    return rows


def clock_row(offset_s: float, error_s: float) -> Row:
    """The far clock compared with ours. Pure."""
    text = f"{offset_s * 1e3:+.2f} ms there, exact to {error_s * 1e3:.2f} ms"
    far_off = abs(offset_s) - error_s > CLOCK_S
    remedy = "synchronise the clocks: chronyc makestep" if far_off else ""
    return Row("bad" if far_off else "ok", "clock", text, f"below {CLOCK_S:g} s", remedy)


def listen(
    address: str, device: str, verbs: VerbsOptions | None = None, model: Path | None = None
) -> None:
    """Waits at HOST:PORT for one near side on another host, and serves it.

    Raises:
        AfdError, CommError: the near side ended, or a message did not come.
    """
    facts = facts_of_this_host(model)
    with socket.create_server(echo.parsed(address)) as server:
        connection, _ = server.accept()
        with echo.streams(connection) as (stream, out):
            asked = json.loads(stream.readline() or "null")
            if not isinstance(asked, dict):
                raise AfdError("the other side ended")
            ways = ["tcp", *(["verbs"] if verbs is not None and asked["verbs"] else [])]
            _say(out, {"facts": facts, "ways": ways})
            for _ in range(_PINGS):
                stream.readline()
                _say(out, time.time())
            here = connection.getsockname()[0]
            for way in ways:
                echo.far(stream, out, device, verbs if way == "verbs" else None, way, here)


def compare_with(
    address: str, device: str, verbs: VerbsOptions | None = None, model: Path | None = None
) -> list[Row]:
    """Compares this host with the one that listens at HOST:PORT.

    Raises:
        AfdError, OSError: nobody listens there, or the other side ended.
    """
    connection = socket.create_connection(echo.parsed(address), echo.TIMEOUT_US / 1e6)
    with echo.streams(connection) as (stream, out):
        _say(out, {"verbs": verbs is not None})
        said = json.loads(stream.readline() or "null")
        if not isinstance(said, dict):
            raise AfdError("the other side ended; see its output")
        rows = compared(facts_of_this_host(model), said["facts"])
        rows.append(clock_row(*_clock(stream, out)))
        here = connection.getsockname()[0]
        for way in said["ways"]:
            given = verbs if way == "verbs" else None
            try:
                found = echo.near(stream, out, device, given, way, here)
            except CommError as error:
                rows.append(Row("bad", way, str(error)[:120], "bytes come back", _of_way(way)))
                break
            rows.append(Row("ok", way, found.text, "bytes come back"))
        if verbs is not None and "verbs" not in said["ways"]:
            rows.append(Row("bad", "verbs", "the other side has no ports", "bytes come back",
                            "give --ports there too"))  # fmt: skip
        return rows


def _of_way(way: str) -> str:
    if way == "verbs":
        return (
            "check `afd doctor` on both hosts, the cable, MTU and the lossless class (docs/rdma.md)"
        )
    return "open the firewall between the hosts for all ports"


def _clock(stream: IO[str], out: IO[str]) -> tuple[float, float]:
    """How far the far clock is ahead, and the largest error of that, seconds: the quickest ping."""
    best = (0.0, float("inf"))
    for _ in range(_PINGS):
        asked = time.time()
        _say(out, None)
        there = float(json.loads(stream.readline()))
        heard = time.time()
        error = (heard - asked) / 2
        if error < best[1]:
            best = (there - (asked + heard) / 2, error)
    return best


def _say(out: IO[str], what: object) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()
