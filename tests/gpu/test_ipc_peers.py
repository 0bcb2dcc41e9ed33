"""One region and three concurrent peers, each in its own process: the FFN side of 3A1F.

With two GPUs the peers share the second one; with four each has its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")
from ipc_peer import TIMEOUT_US, Peer, peer, send, slots_of, wait  # noqa: E402
from slots_on import GPU, GPU_0  # noqa: E402

from afd_comm import Link, Region, Status, make_flag  # noqa: E402

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs"),
]
PEERS, DEPTH = 3, 3
SHARE = 300_000
"""Bytes of one peer's rows in a micro-batch; its slot is peer * DEPTH + micro-batch."""


class Ffn:
    """The FFN side. All peers' rows of a micro-batch are adjacent in one payload."""

    def __init__(self, running: list[Peer]) -> None:
        self.region = Region(PEERS * DEPTH, PEERS * SHARE, name="ffn", device=GPU_0, payloads=DEPTH)
        self.links = []
        for other in running:
            other.write(self.region.addresses)
            addresses = other.read()
            self.links.append(
                Link(addresses, slots=(0, DEPTH), timeout_us=TIMEOUT_US, device=GPU_0)
            )
        self.memory = slots_of(self.region)[:, : PEERS * SHARE]
        self.answers = torch.empty_like(self.memory)
        # loads the kernel; loading would block while a wait is pending
        torch.add(self.memory[0], 1, out=self.answers[0])
        torch.cuda.synchronize()

    def step(self, seq: int, slots: list[int]) -> None:
        """Per micro-batch: waits for all peers, adds 1 to their rows, sends each its answer."""
        for mb in range(DEPTH):
            mine = [slot for slot in slots if slot % DEPTH == mb]
            wait(self.region, mine, [make_flag(1, seq)] * len(mine))
            torch.add(self.memory[mb], 1, out=self.answers[mb])
            for slot in mine:
                who = slot // DEPTH
                rows = self.answers[mb, who * SHARE : (who + 1) * SHARE]
                send(self.links[who], mb, make_flag(1, seq), rows)

    def finish(self, seq: int, slots: list[int], ms: int = 20_000) -> list[Status]:
        stream = torch.cuda.current_stream().cuda_stream
        guard = self.region.guard(stream, slots, [make_flag(1, seq)] * len(slots))
        return guard.wait(ms * 1000)


@pytest.fixture
def running() -> Iterator[list[Peer]]:
    torch.cuda.set_device(0)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                peer(
                    "attention",
                    device=f"{GPU}:{1 + who % (GPUS - 1)}",
                    who=who,
                    depth=DEPTH,
                    share=SHARE,
                )
            )
            for who in range(PEERS)
        ]


def test_three_peers_at_once(running: list[Peer]) -> None:
    ffn, slots, steps = Ffn(running), list(range(PEERS * DEPTH)), 40
    for other in running:
        other.write(steps)
    for seq in range(1, steps + 1):
        ffn.step(seq, slots)
    assert ffn.finish(steps, slots, 60_000) == [Status.OK] * len(slots)
    assert [other.read() for other in running] == [0, 0, 0]  # wrong bytes


def test_a_killed_peer_does_not_delay_the_others(running: list[Peer]) -> None:
    ffn, slots = Ffn(running), list(range(PEERS * DEPTH))
    for other in running:
        other.write(1)
    ffn.step(1, slots)
    assert ffn.finish(1, slots) == [Status.OK] * len(slots)
    assert [other.read() for other in running] == [0, 0, 0]
    running[1].process.kill()
    running[1].process.wait()
    start = time.monotonic()
    for mb in range(DEPTH):
        wait(ffn.region, [mb + p * DEPTH for p in range(PEERS)], [make_flag(1, 2)] * PEERS)
    for other in (running[0], running[2]):
        other.write(1)
    gone = [Status.PEER_GONE] * DEPTH
    assert ffn.finish(2, slots) == [Status.OK] * DEPTH + gone + [Status.OK] * DEPTH
    assert time.monotonic() - start < 5
    assert torch.ones(4, device="cuda").sum().item() == 4
