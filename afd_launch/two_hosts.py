"""`afd doctor --listen` and `--peer`: compares two hosts, and moves bytes between them.

The near side opens one connection per check, so that a check that fails does not stop the next. The
far side serves them one after the other, until the near side says that it is done.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from afd.errors import AfdError
from afd_comm import CommError
from afd_launch import echo, wire_rate
from afd_launch.findings import Measured, Row, judged
from afd_launch.host_facts import compared, facts_of_this_host
from afd_launch.json_lines import heard, say
from afd_launch.model_files import files_row, hashes
from afd_launch.rails import Rails, shared_gbits

CLOCK_S = 2.0  # control.clock_s: a larger difference is refused at the start of a deployment
_PINGS = 16
_QUIET_S = 120.0  # a near side that asks for nothing for so long has ended
_TCP_SHARE = 0.5  # of the interface's speed
_TCP_MOST = 20.0  # Gb/s, which one connection reaches; hosts with few CPUs use one
_RDMA_SHARE = 0.9  # docs/rdma.md: what ib_write_bw reaches of a port's rate


@dataclass(frozen=True)
class Host:
    """This host's part. device: of the slots. whole_files: hash every byte of the checkpoint.

    seconds: what each rate and each latency takes, about.
    """

    device: str
    rails: Rails = field(default_factory=Rails)
    model: Path | None = None
    whole_files: bool = False
    seconds: float = 1.0


@dataclass(frozen=True)
class Found:
    """rows: the comparison. measured: what a container can be compared with."""

    rows: tuple[Row, ...]
    measured: tuple[Measured, ...]


def clock_row(offset_s: float, error_s: float) -> Row:
    """The far clock compared with ours. Pure."""
    text = f"{offset_s * 1e3:+.2f} ms there, exact to {error_s * 1e3:.2f} ms"
    far_off = abs(offset_s) - error_s > CLOCK_S
    remedy = "synchronise the clocks: chronyc makestep" if far_off else ""
    return Row("bad" if far_off else "ok", "clock", text, f"below {CLOCK_S:g} s", remedy)


# -- the far side


def listen(address: str, host: Host) -> int:
    """Waits at HOST:PORT for one near side on another host, and serves its checks.

    Returns: the exit status of the near side, so that the jobs of both hosts end alike.

    Raises:
        AfdError: the near side ended before it was done.
        ConfigError: the checkpoint cannot be read.
    """
    facts = facts_of_this_host(host.model)
    with socket.create_server(echo.parsed(address)) as server:
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise AfdError("the other side ended") from None
            server.settimeout(_QUIET_S)
            connection.settimeout(None)
            try:
                with echo.streams(connection) as (stream, out):
                    order = heard(stream)
                    if order["check"] == "end":
                        return int(order["status"])
                    _serve(order, stream, out, host, facts, connection.getsockname()[0])
            except (AfdError, CommError, OSError, ValueError, TypeError, LookupError) as error:
                print(f"a check ended: {error}", flush=True)


def _serve(
    order: dict[str, Any], stream: IO[str], out: IO[str], host: Host, facts: Any, here: str
) -> None:
    rails = host.rails.at(here)
    match order["check"]:
        case "facts":
            files = hashes(host.model, whole=order["whole"]) if host.model is not None else None
            tcp = [[rail.name, rail.gbits] for rail in rails.tcp()]
            rdma = [[port, rails.rdma_gbits(port)] for port in rails.ports]
            say(out, {"facts": facts, "files": files, "tcp": tcp, "rdma": rdma})
        case "clock":
            for _ in range(_PINGS):
                stream.readline()
                say(out, time.time())
        case "echo":
            verbs = rails.verbs() if order["way"] == "verbs" else None
            echo.far(stream, out, host.device, verbs, order["way"], here)
        case "rate":
            device = host.device if order["slots"] else "cpu"
            _far_rate(stream, out, _way(rails, order["way"], order["rail"], device))


def _far_rate(stream: IO[str], out: IO[str], way: wire_rate.Way) -> None:
    def swap(addresses: list[str]) -> list[str]:
        say(out, addresses)
        return heard(stream)  # type: ignore[no-any-return]

    end = wire_rate.End(way, swap)
    try:
        while (line := stream.readline()) and (order := json.loads(line)):
            what, count = order
            if what == "receive":
                end.receive(count)
            elif what == "send":
                say(out, end.send(count))
            else:
                end.bounce(count, starts=False)
    finally:
        end.close()


# -- the near side


def compare_with(address: str, host: Host, limits: dict[str, float], only: set[str]) -> Found:
    """Compares this host with the one that listens at HOST:PORT.

    Args:
        limits: see :func:`afd_launch.findings.judged`. only: of "tcp" and "rdma", what to measure.

    Raises:
        AfdError, OSError: nobody listens there, or the other side ended.
    """
    near = _Near(address, host)
    said = near.said
    rows = compared(facts_of_this_host(host.model), said["facts"])
    if host.model is not None and said["files"] is not None:
        mine = hashes(host.model, whole=host.whole_files)
        rows.append(files_row(mine, said["files"], whole=host.whole_files))
    rows.append(clock_row(*near.clock()))
    measured: list[Measured] = []
    if "tcp" in only:
        rows.append(near.echo("tcp"))
        ours = near.rails.tcp()
        rows += _counts("TCP addresses", len(ours), len(said["tcp"]), "--addresses")
        for number, (rail, (_, there)) in enumerate(zip(ours, said["tcp"], strict=False)):
            speed = shared_gbits(rail.gbits, there)
            limit = None if speed is None else min(_TCP_SHARE * speed, _TCP_MOST)
            rows += near.rate(f"tcp {rail.name}", "tcp", number, limit, limits, measured)
    if "rdma" in only and (near.rails.ports or said["rdma"]):
        ports = near.rails.ports
        rows += _counts("RDMA ports", len(ports), len(said["rdma"]), "--ports")
        if len(ports) == len(said["rdma"]):
            rows.append(near.echo("verbs"))
        for number, (port, (_, there)) in enumerate(zip(ports, said["rdma"], strict=False)):
            speed = shared_gbits(near.rails.rdma_gbits(port), there)
            limit = None if speed is None else _RDMA_SHARE * speed
            rows += near.rate(f"rdma {port}", "verbs", number, limit, limits, measured)
    return Found(tuple(rows), tuple(measured))


def say_end(address: str, status: int) -> None:
    """Tells the far side that the checks are done, and how they ended."""
    with socket.create_connection(echo.parsed(address), 10) as connection:
        connection.sendall(json.dumps({"check": "end", "status": status}).encode() + b"\n")


def _counts(what: str, here: int, there: int, option: str) -> list[Row]:
    if here == there:
        return []
    text = f"{here} here, {there} there"
    return [Row("bad", what, text, "the same number", f"name them on both sides with {option}")]


class _Near:
    """Asks the far side, one connection per check."""

    def __init__(self, address: str, host: Host) -> None:
        self._address, self._host = echo.parsed(address), host
        with socket.create_connection(self._address, echo.TIMEOUT_US / 1e6) as connection:
            connection.settimeout(None)
            self._here = connection.getsockname()[0]
            with echo.streams(connection) as (stream, out):
                say(out, {"check": "facts", "whole": host.whole_files})
                self.said = heard(stream)
        if not isinstance(self.said, dict):
            raise AfdError("the other side is no `afd doctor --listen` of this version")
        self.rails = host.rails.at(self._here)

    @contextmanager
    def _asked(self, **order: object) -> Iterator[tuple[IO[str], IO[str]]]:
        connection = socket.create_connection(self._address, echo.TIMEOUT_US / 1e6)
        connection.settimeout(None)
        with echo.streams(connection) as (stream, out):
            say(out, order)
            yield stream, out

    def clock(self) -> tuple[float, float]:
        """How far the far clock is ahead, and the largest error of that, seconds: the quickest
        ping."""
        best = (0.0, float("inf"))
        with self._asked(check="clock") as (stream, out):
            for _ in range(_PINGS):
                asked = time.time()
                say(out, None)
                there = float(heard(stream))
                now = time.time()
                error = (now - asked) / 2
                if error < best[1]:
                    best = (there - (asked + now) / 2, error)
        return best

    def echo(self, way: str) -> Row:
        verbs = self.rails.verbs() if way == "verbs" else None
        try:
            with self._asked(check="echo", way=way) as (stream, out):
                found = echo.near(stream, out, self._host.device, verbs, way, self._here)
        except (AfdError, CommError, OSError) as error:
            return Row("bad", way, str(error)[:120], "bytes come back", _of_way(way))
        return Row("ok", way, found.text, "bytes come back")

    def rate(
        self,
        where: str,
        way: str,
        rail: int,
        limit: float | None,
        limits: dict[str, float],
        measured: list[Measured],
    ) -> list[Row]:
        """The lines of one rail; adds what was measured."""
        kind = "rdma" if way == "verbs" else "tcp"
        seconds = self._host.seconds
        try:
            with self._end(way, rail, "cpu") as (end, ask, _):
                latency = wire_rate.latencies(end, ask, seconds)
            with self._end(way, rail, self._host.device) as (end, ask, answer):
                there, back = wire_rate.rates(end, ask, answer, seconds)
        except (AfdError, CommError, OSError, ValueError) as error:
            return [Row("bad", where, str(error)[:160], "messages arrive", _of_way(way))]
        words = f"{median(there):.3g} there, {median(back):.3g} back"
        slower = tuple(min(there, back, key=median))
        found = [
            Measured(f"{kind}_gbits", where, slower, limit, words),
            Measured(f"{kind}_us", where, tuple(latency)),
        ]
        measured += found
        return [judged(one, limits) for one in found]

    @contextmanager
    def _end(
        self, way: str, rail: int, device: str
    ) -> Iterator[tuple[wire_rate.End, wire_rate.Ask, Callable[[], float]]]:
        """Both ends of one rail, the far one waiting for orders, which end with the block."""
        order = {"check": "rate", "way": way, "rail": rail, "slots": device != "cpu"}
        with self._asked(**order) as (stream, out):

            def swap(addresses: list[str]) -> list[str]:
                theirs = heard(stream)
                say(out, addresses)
                return theirs  # type: ignore[no-any-return]

            end = wire_rate.End(_way(self.rails, way, rail, device), swap)
            try:
                yield end, lambda *order: say(out, order), lambda: float(heard(stream))
                say(out, None)
            finally:
                end.close()


def _way(rails: Rails, backend: str, rail: int, device: str) -> wire_rate.Way:
    if backend == "verbs":
        return wire_rate.Way("verbs", device, verbs=rails.verbs(rail))
    return wire_rate.Way("tcp", device, host=rails.addresses[rail])


def _of_way(way: str) -> str:
    if way == "verbs":
        return (
            "check `afd doctor` on both hosts, the cable, MTU and the lossless class (docs/rdma.md)"
        )
    return "open the firewall between the hosts for all ports"
