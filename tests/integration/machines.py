"""Two hosts on one: network namespaces joined by a cable, each with processes of its own.

A machine keeps its network while what runs on it is killed and started again. Everything ends with
the test process, because no namespace has a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from helpers import wait_until

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
# The processes of a machine see one another only, and end when its first one does.
_APART = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")


def why_not() -> str | None:
    """Returns why this host cannot make machines, or None."""
    try:
        done = subprocess.run(
            ["unshare", "--net", *_APART[1:], "ip", "link", "add", "name", "x", "type", "veth"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except OSError as error:
        return f"{error.filename} is missing (util-linux, iproute2)"
    if done.returncode:
        return f"namespaces are not allowed here: {done.stderr.strip()}"
    return None


@dataclass(frozen=True)
class Machine:
    """A network namespace. address: of its end of the cable, eth0. holder: pid that keeps it."""

    name: str
    address: str
    holder: int

    def argv(self, *command: str) -> list[str]:
        """Returns the command as it is run in this network."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", *command]

    def ip(self, *arguments: str) -> None:
        subprocess.run(self.argv("ip", *arguments), check=True, timeout=10)

    def cut(self) -> None:
        self.ip("link", "set", "eth0", "down")

    def mend(self) -> None:
        self.ip("link", "set", "eth0", "up")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and those that it starts meanwhile, use the network of the machine."""
        with open("/proc/thread-self/ns/net") as ours, open(f"/proc/{self.holder}/ns/net") as its:
            _enter(its.fileno())
            try:
                yield
            finally:
                _enter(ours.fileno())


def _enter(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Machines a (10.77.0.1) and b (10.77.0.2), joined by a cable."""
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(_machine(n, f"10.77.0.{i}")) for i, n in ((1, "a"), (2, "b")))
        a.ip(
            "link",
            "add",
            "name",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(b.holder),
        )
        for machine in (a, b):
            machine.ip("address", "add", f"{machine.address}/24", "dev", "eth0")
            machine.ip("link", "set", "lo", "up")
            machine.ip("link", "set", "eth0", "up")
        yield a, b


@contextlib.contextmanager
def _machine(name: str, address: str) -> Iterator[Machine]:
    # Its standard input breaks when this process ends, so that it ends too.
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
    try:
        ours = os.readlink("/proc/self/ns/net")
        wait_until(
            lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != ours, 10, "a network of its own"
        )
        yield Machine(name, address, holder.pid)
    finally:
        holder.kill()
        holder.communicate()


@dataclass(frozen=True)
class Run:
    """A command on a machine. process: the one outside; the command is its child."""

    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, words: str, deadline_s: float, since: int = 0) -> None:
        """since: length of :meth:`text` from which on it must say them."""

        def said() -> bool:
            ended = self.process.poll() is not None
            found = words in self.text()[since:]
            assert not ended or found, f"it has ended:\n{self.text()[-3000:]}"
            return found

        wait_until(said, deadline_s, f"it says {words!r}")

    def end(self, deadline_s: float = 40.0) -> int:
        """Sends SIGTERM, as a service manager does; returns the exit status."""
        for child in psutil.Process(self.process.pid).children():
            child.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def kill(self) -> None:
        """The machine loses its power: every process of the command ends at once."""
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def running(machine: Machine, *command: str, log: Path) -> Iterator[Run]:
    """Runs a command and what it starts on a machine; kills all of it at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            machine.argv(*_APART, *command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    run = Run(process, log)
    try:
        yield run
    finally:
        if process.poll() is None:
            with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
                run.end(20)
        if process.poll() is None:
            run.kill()


@contextlib.contextmanager
def star(names: Sequence[str]) -> Iterator[dict[str, Machine]]:
    """A machine "hub" (10.77.0.1) and one per name (10.77.0.2 and up), each on a cable of its own
    to a switch in the hub."""
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(_machine("hub", "10.77.0.1"))
        hub.ip("link", "set", "lo", "up")
        hub.ip("link", "add", "name", "switch", "type", "bridge")
        hub.ip("address", "add", f"{hub.address}/24", "dev", "switch")
        hub.ip("link", "set", "switch", "up")
        found = {"hub": hub}
        for number, name in enumerate(names, start=2):
            one = stack.enter_context(_machine(name, f"10.77.0.{number}"))
            port = f"port{number}"
            cable = f"link add name {port} type veth peer name eth0 netns {one.holder}"
            hub.ip(*cable.split())
            hub.ip("link", "set", port, "master", "switch")
            hub.ip("link", "set", port, "up")
            one.ip("address", "add", f"{one.address}/24", "dev", "eth0")
            one.ip("link", "set", "lo", "up")
            one.ip("link", "set", "eth0", "up")
            found[name] = one
        yield found
