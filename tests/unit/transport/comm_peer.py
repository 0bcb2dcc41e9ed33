"""The peer process of the comm tests: ``python comm_peer.py MODE JSON``.

It exchanges JSON lines over stdin and stdout and exits at the end of stdin. Modes:
own   {slots, slot_bytes, tcp[, device]}
      create a Region, print its addresses
show  {slots, slot_bytes, tcp[, device, verbs]}
      the same; then for each [slot, flag, n] wait and print the SHA-256 of the payload's first n
      bytes. verbs: a libibverbs without hardware
send  {addresses, backend, slots, flag, value[, device]}
      claim slots, post ``value`` bytes to each, print "posted"
echo  {slots, slot_bytes, tcp, backend, count}
      create a Region, print its addresses, read the other side's addresses, then send each message
      back with 1 added to every byte
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from afd_comm import Link, Message, Region, Status, VerbsOptions, make_flag

TIMEOUT_US = 5_000_000


def post(link: Link, slot: int, flag: int, data: np.ndarray, offset: int = 0) -> Status:
    """Posts one contiguous array to byte ``offset`` of the slot."""
    part = (offset, data.ctypes.data, data.nbytes)
    return link.post(Message(slot, [part], count=len(data)), flag)


class Peer:
    """A running comm_peer process."""

    def __init__(self, mode: str, **arguments: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), mode, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def write(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()


@contextmanager
def peer(mode: str, **arguments: Any) -> Iterator[Peer]:
    """Starts a peer; the end of the block kills and reaps it."""
    running = Peer(mode, **arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def region_of(arguments: dict[str, Any]) -> Region:
    host = "127.0.0.1" if arguments["tcp"] else None
    library = arguments.get("verbs")
    ports = ["fake0", "fake1:1"]
    return Region(
        arguments["slots"],
        arguments["slot_bytes"],
        name="peer",
        tcp_host=host,
        device=arguments.get("device", "cpu"),
        verbs=VerbsOptions(ports=ports, host="127.0.0.1", library=library) if library else None,
    )


def show(arguments: dict[str, Any]) -> None:
    from gpu_cases import memory_of

    region = region_of(arguments)
    say(region.addresses)
    for line in sys.stdin:
        slot, flag, n = json.loads(line)
        if region.wait_all([slot], [flag], TIMEOUT_US) != [Status.OK]:
            sys.exit("nothing came")
        on_host = region.device == "cpu"
        payload = region.buffer(slot) if on_host else memory_of(region, slot)[0]
        say(hashlib.sha256(payload[:n]).hexdigest())


def own(arguments: dict[str, Any]) -> None:
    region = region_of(arguments)
    say(region.addresses)
    sys.stdin.read()


def send(arguments: dict[str, Any]) -> None:
    first, count = arguments["slots"]
    link = Link(
        arguments["addresses"],
        backend=arguments["backend"],
        slots=(first, count),
        timeout_us=TIMEOUT_US,
        device=arguments.get("device", "cpu"),
    )
    data = np.full(16, arguments["value"], np.uint8)
    statuses = [post(link, slot, arguments["flag"], data) for slot in range(first, first + count)]
    say("posted" if set(statuses) == {Status.OK} else [int(s) for s in statuses])
    sys.stdin.read()


def echo(arguments: dict[str, Any]) -> None:
    region = region_of(arguments)
    say(region.addresses)
    addresses = json.loads(sys.stdin.readline())
    link = Link(addresses, backend=arguments["backend"], slots=(0, 1), timeout_us=TIMEOUT_US)
    for seq in range(1, arguments["count"] + 1):
        flag = make_flag(1, seq)
        if region.wait_all([0], [flag], TIMEOUT_US) != [Status.OK]:
            sys.exit("nothing came")
        count = region.header(0).count
        if post(link, 0, flag, region.buffer(0)[:count] + np.uint8(1)) != Status.OK:
            sys.exit("posting the answer failed")
    sys.stdin.read()


if __name__ == "__main__":
    {"own": own, "show": show, "send": send, "echo": echo}[sys.argv[1]](json.loads(sys.argv[2]))
