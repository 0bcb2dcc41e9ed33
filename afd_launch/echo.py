"""A round trip through a receive slot of another process: the active part of `afd doctor`.

The near side posts bytes from host memory into a slot of the far side, which posts them back out of
that slot. With a GPU device the far slot is GPU memory, so both directions cross the link that a
deployment would use. No torch: so it also runs where a kernel cannot.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np

from afd.devices import device_named
from afd.errors import AfdError, ConfigError
from afd_comm import CommError, Link, Message, Region, Status, VerbsOptions
from afd_launch.json_lines import heard, say

NBYTES = 1 << 20
ROUNDS = 8
TIMEOUT_US = 20_000_000


@dataclass(frozen=True)
class Echo:
    """What round trips showed. backend: of the link. rounds: seconds of each."""

    backend: str
    rounds: tuple[float, ...]

    @property
    def gbytes(self) -> tuple[float, ...]:
        """GB/s of each round, both directions together."""
        return tuple(2 * NBYTES / seconds / 1e9 for seconds in self.rounds)

    @property
    def text(self) -> str:
        return (
            f"{self.backend}: {NBYTES >> 20} MiB there and back, bytes equal, {ROUNDS} times;"
            f" {min(self.rounds) * 1e3:.2f} ms, {max(self.gbytes):.1f} GB/s"
        )


def far(
    stream: IO[str],
    out: IO[str],
    device: str,
    verbs: VerbsOptions | None = None,
    backend: str = "auto",
    host: str | None = None,
) -> None:
    """Serves one near side over a pair of text streams, then returns.

    host: this host's address, for backend tcp.
    """
    where = device_named(device).region_device
    region = Region(1, NBYTES, name="doctor-far", device=where, verbs=verbs, tcp_host=host)
    say(out, region.addresses)
    link = _link(_received(stream), backend, where, verbs)
    address = payload_address(region)
    if verbs is not None and where != "cpu":
        link.register_memory(address, NBYTES, where)
    for flag in range(1, ROUNDS + 1):
        _check(region.wait_all([0], [flag], TIMEOUT_US)[0], "the request")
        _check(link.post(Message(0, [(0, address, NBYTES)]), flag), "the answer")
    _received(stream)  # the near side has read it


def near(
    stream: IO[str],
    out: IO[str],
    device: str,
    verbs: VerbsOptions | None = None,
    backend: str = "auto",
    host: str | None = None,
) -> Echo:
    """Runs the round trips. Raises AfdError if the bytes differ or a message does not come.

    host: this host's address, for backend tcp.
    """
    where = device_named(device).region_device
    region = Region(1, NBYTES, name="doctor-near", verbs=verbs, tcp_host=host)
    link = _link(_received(stream), backend, where, verbs)
    say(out, region.addresses)
    random, times = np.random.default_rng(0), []
    for flag in range(1, ROUNDS + 1):
        data = random.integers(0, 256, NBYTES, dtype=np.uint8)
        began = time.monotonic()
        _check(link.post(Message(0, [(0, data.ctypes.data, NBYTES)]), flag), "the request")
        _check(region.wait_all([0], [flag], TIMEOUT_US)[0], "the answer")
        times.append(time.monotonic() - began)
        if not np.array_equal(region.buffer(0)[:NBYTES], data):
            raise AfdError(f"round {flag} came back with other bytes")
    say(out, [])
    return Echo(link.backend, tuple(times))


def on_this_host(device: str) -> Echo:
    """A round trip with another process of this host. Raises AfdError, CommError."""
    code = f"import sys; from afd_launch import echo; echo.far(sys.stdin, sys.stdout, {device!r})"
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as other:
        assert other.stdin and other.stdout and other.stderr
        try:
            return near(other.stdout, other.stdin, device)
        except (CommError, AfdError, ValueError) as error:
            other.kill()
            lines = other.stderr.read().strip().splitlines()
            raise AfdError(lines[-1] if lines else str(error)) from None


@contextmanager
def streams(connection: socket.socket) -> Iterator[tuple[IO[str], IO[str]]]:
    with connection, connection.makefile("r") as stream, connection.makefile("w") as out:
        yield stream, out


def parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r} is no address; use HOST:PORT")
    return host, int(port)


def _link(addresses: list[str], backend: str, device: str, verbs: VerbsOptions | None) -> Link:
    return Link(
        addresses,
        backend=backend,
        slots=(0, 1),
        timeout_us=TIMEOUT_US,
        device=device,
        verbs=verbs,
    )


def _received(stream: IO[str]) -> list[str]:
    addresses = heard(stream)
    if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
        raise AfdError("the other side ended")
    return addresses


def _check(status: Status, what: str) -> None:
    if status != Status.OK:
        raise AfdError(f"{what} did not come: {status.name}")


def payload_address(region: Region) -> int:
    """Address of the slot, in host or device memory: a DLTensor begins with its data pointer."""
    if region.device == "cpu":
        return int(region.buffer(0).ctypes.data)
    content = ctypes.pythonapi.PyCapsule_GetPointer
    content.restype, content.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = region.view(0).__dlpack__()  # owns the tensor
    address = ctypes.cast(content(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_void_p))[0]
    assert address is not None
    return int(address)
