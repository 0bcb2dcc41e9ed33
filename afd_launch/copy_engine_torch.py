"""GPU copy engine and doorbell: rounds through GPU memory of another process, in stream order.

A round is a message there and one back. Both processes enqueue their part of many rounds on a
stream, and no host waits inside of one: it is the way of captured steps on one host.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import IO

import torch

from afd.devices import device_named
from afd.errors import AfdError
from afd.wire.streams_torch import runtime_of, torch_device
from afd_comm import CommError, Link, Message, Region, Status, make_flag
from afd_launch.echo import payload_address
from afd_launch.findings import Measured
from afd_launch.gpu_facts import scale_up_gbytes
from afd_launch.installation import find_gpus
from afd_launch.json_lines import heard, say

SMALL, LARGE = 64, 16 << 20
ROUNDS = 100
TURNS = 5
TIMEOUT_US = 20_000_000
_SHARE = 0.4  # of the links' data sheet rate, per direction
_SLOTS = 2


class _End:
    def __init__(self, stream: IO[str], out: IO[str], device: str, number: int) -> None:
        where = f"{device_named(device).region_type}:{number}"
        own = torch.device(torch_device(device).type, number)
        runtime_of(own).enter(own)
        self._stream = runtime_of(own).streams(own, 1).compute
        self._region = Region(_SLOTS, LARGE, name="doctor", device=where)
        say(out, self._region.addresses)
        self._link = Link(heard(stream), slots=(0, _SLOTS), timeout_us=TIMEOUT_US, device=where)
        if self._link.backend != "ipc":
            raise AfdError(f"the GPUs' processes are linked by {self._link.backend}, not by ipc")
        self._source = payload_address(self._region)
        self._generation = 0

    def rounds(self, nbytes: int, *, starts: bool) -> float:
        """Runs the rounds; returns seconds per round. Raises AfdError, CommError."""
        self._generation += 1
        messages = [Message(slot, [(0, self._source, nbytes)]) for slot in range(_SLOTS)]
        slots = [number % _SLOTS for number in range(ROUNDS)]
        flags = [make_flag(self._generation, number + 1) for number in range(ROUNDS)]
        began = time.perf_counter()
        for slot, flag in zip(slots, flags, strict=True):
            if starts:
                self._send(messages[slot], flag)
            self._region.enqueue_wait(self._stream, [slot], [flag])
            if not starts:
                self._send(messages[slot], flag)
        seen = self._region.guard(self._stream, slots, flags).wait(TIMEOUT_US)
        if any(status != Status.OK for status in seen):
            raise AfdError(f"a message did not come: {max(seen).name}")
        return (time.perf_counter() - began) / ROUNDS

    def _send(self, message: Message, flag: int) -> None:
        status = self._link.enqueue(self._stream, message, flag)
        if status != Status.OK:
            raise AfdError(f"a message was not sent: {status.name}")

    def close(self) -> None:
        self._link.close()
        self._region.close()


def far(stream: IO[str], out: IO[str], device: str, number: int) -> None:
    """Serves one near side over a pair of text streams, then returns."""
    end = _End(stream, out, device, number)
    while (nbytes := heard(stream)) is not None:
        say(out, None)
        end.rounds(nbytes, starts=False)
    end.close()


def measure(device: str) -> list[Measured]:
    """Measures between two GPUs of this host, or between two processes on its only one.

    Raises:
        AfdError: the other process ended, or a message did not come.
    """
    gpus = find_gpus().count
    code = (
        "import sys; from afd_launch import copy_engine_torch;"
        f"copy_engine_torch.far(sys.stdin, sys.stdout, {device!r}, {int(gpus > 1)})"
    )
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as other:
        assert other.stdin and other.stdout and other.stderr
        try:
            return _near(other.stdout, other.stdin, device, gpus)
        except (CommError, AfdError, ValueError) as error:
            other.kill()
            lines = other.stderr.read().strip().splitlines()
            raise AfdError(lines[-1] if lines else str(error)) from None


def _near(stream: IO[str], out: IO[str], device: str, gpus: int) -> list[Measured]:
    end = _End(stream, out, device, 0)
    found: dict[int, list[float]] = {}
    for nbytes in (SMALL, LARGE):
        times = []
        for _ in range(TURNS + 1):
            say(out, nbytes)
            heard(stream)
            times.append(end.rounds(nbytes, starts=True))
        found[nbytes] = times[1:]  # the first one warms up
    say(out, None)
    end.close()
    link = scale_up_gbytes()
    limit = None if link is None else _SHARE * link
    note = f"{LARGE >> 20} MiB, " + ("GPU 0 and 1" if gpus > 1 else "two processes on one GPU")
    rates = tuple(2 * LARGE / seconds / 1e9 for seconds in found[LARGE])
    times_us = tuple(seconds * 1e6 for seconds in found[SMALL])
    return [
        Measured("copy_gbytes", "copy engine", rates, limit, note),
        Measured("doorbell_us", "doorbell", times_us, None, f"{SMALL} B"),
    ]
