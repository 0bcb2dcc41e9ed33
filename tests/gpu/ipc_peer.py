"""The FFN side of the GPU transport tests: ``python ipc_peer.py MODE JSON``.

It prints its Region's addresses, reads the other side's addresses from stdin, then answers every
message with its payload + 1 (uint8). It exits at the end of stdin. Modes:
echo  {device, slots, slot_bytes, sizes}: eager; message i has sizes[i] bytes in slot i % slots
graph {device, slots, slot_bytes, positions, replays}: full slots; replays one captured graph of
      ``positions`` messages ``replays`` times; position p uses slot p % slots
cpu   {slots, slot_bytes, sizes}: as echo, on the CPU, over a Region in host memory
attention {device, who, depth, share}: the attention side. It reads the other side's addresses
      first, then prints its own. Each further line is a number of steps. In each step it sends
      ``depth`` micro-batches of ``share`` random bytes, to slot who * depth + micro-batch at offset
      who * share, and waits for the answers. Then it prints the number of wrong bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from afd_comm import Link, Message, Region, Status, make_flag

TIMEOUT_US = 20_000_000


def slots_of(region: Region) -> torch.Tensor:
    """Returns a view of the region's payloads: uint8 [payloads, stride]."""
    return torch.from_dlpack(region.view(0, region.payloads))


def send(link: Link, slot: int, flag: int, data: torch.Tensor, offset: int = 0) -> None:
    """Enqueues one contiguous uint8 tensor on the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    parts = [(offset, data.data_ptr(), data.nbytes)]
    status = link.enqueue(stream, Message(slot, parts, count=data.nbytes), flag)
    assert status == Status.OK, status


def wait(region: Region, slots: list[int], flags: list[int]) -> None:
    region.enqueue_wait(torch.cuda.current_stream().cuda_stream, slots, flags)


class Peer:
    """A running ipc_peer process."""

    def __init__(self, mode: str, **arguments: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), mode, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer process ended; its traceback is above"
        return json.loads(line)

    def write(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()


@contextmanager
def peer(mode: str, **arguments: Any) -> Iterator[Peer]:
    """Starts a peer; the end of the block kills and reaps it."""
    running = Peer(mode, **arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


def _open(arguments: dict[str, Any], device: str) -> tuple[Region, Link]:
    count = arguments["slots"]
    region = Region(count, arguments["slot_bytes"], name="ffn", device=device)
    print(json.dumps(region.addresses), flush=True)
    addresses = json.loads(sys.stdin.readline())
    link = Link(addresses, slots=(0, count), timeout_us=TIMEOUT_US, device=device)
    return region, link


Ends = tuple[Region, Link]
"""Objects that stay open after a mode ends: closing them would end the other side's link."""


def echo(arguments: dict[str, Any]) -> Ends:
    region, link = _open(arguments, arguments["device"])
    answers, memory = slots_of(region).clone(), slots_of(region)
    for i, size in enumerate(arguments["sizes"]):
        slot, flag = i % region.slots, make_flag(1, i + 1)
        wait(region, [slot], [flag])
        torch.add(memory[slot, :size], 1, out=answers[slot, :size])
        send(link, slot, flag, answers[slot, :size])
    return region, link


def graph(arguments: dict[str, Any]) -> Ends:
    region, link = _open(arguments, arguments["device"])
    answers, memory = slots_of(region).clone(), slots_of(region)
    # Loads the kernel; loading would block while a wait is pending.
    torch.add(memory, 1, out=answers)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for p in range(arguments["positions"]):
            slot, flag = p % region.slots, make_flag(1, p + 1)
            wait(region, [slot], [flag])
            torch.add(memory[slot], 1, out=answers[slot])
            send(link, slot, flag, answers[slot])
    print(json.dumps("captured"), flush=True)
    for _ in range(arguments["replays"]):
        captured.replay()
    return region, link


def cpu(arguments: dict[str, Any]) -> Ends:
    region, link = _open(arguments, "cpu")
    for i, size in enumerate(arguments["sizes"]):
        slot, flag = i % region.slots, make_flag(1, i + 1)
        assert region.wait_all([slot], [flag], TIMEOUT_US) == [Status.OK]
        assert region.header(slot).count == size
        answer = region.buffer(slot)[:size] + np.uint8(1)
        parts = [(0, answer.ctypes.data, answer.nbytes)]
        assert link.post(Message(slot, parts, count=size), flag) == Status.OK
    return region, link


def attention(arguments: dict[str, Any]) -> Ends:
    who, depth, share = (int(arguments[name]) for name in ("who", "depth", "share"))
    device = arguments["device"]
    region = Region(depth, share, name=f"attention-{who}", device=device)
    addresses = json.loads(sys.stdin.readline())
    link = Link(addresses, slots=(who * depth, depth), timeout_us=TIMEOUT_US, device=device)
    memory = slots_of(region)[:, :share]
    data = torch.empty(depth, share, dtype=torch.uint8, device="cuda").random_()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong += (memory != data + 1).sum()  # loads the kernels
    wrong.zero_()
    print(json.dumps(region.addresses), flush=True)
    seq = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            seq += 1
            data.random_()
            for mb in range(depth):
                send(link, who * depth + mb, make_flag(1, seq), data[mb], offset=who * share)
            wait(region, list(range(depth)), [make_flag(1, seq)] * depth)
            wrong += (memory != data + 1).sum()
        print(json.dumps(wrong.item()), flush=True)
    return region, link


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    if "device" in settings:
        torch.cuda.set_device(int(settings["device"].rpartition(":")[2]))
    modes = {"echo": echo, "graph": graph, "cpu": cpu, "attention": attention}
    held = modes[sys.argv[1]](settings)
    if "device" in settings:
        torch.cuda.synchronize()
    sys.stdin.read()
    del held
