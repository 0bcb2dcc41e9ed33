"""Three micro-batches in flight: what transfers add to computing that could hide them.

Rank 0 (attention) and rank 1 (FFN) each compute about 100 us per micro-batch. Rank 0 computes a
micro-batch again once its answer is there; sends go over a stream of their own, as they would
behind a layer. What counts is the time from one micro-batch's end to the next one's on rank 0, and
by how much it is longer than that of the same graph without sends and waits.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from afd_comm import Link, Region, Status, make_flag

DEPTH = 3
MESSAGES = 20 * DEPTH
"""Of one captured graph. A replay fills and drains the pipeline; only what is between is timed."""
GEMM = (4096, 2048, 4096)
"""M, K, N of a bf16 product: about 100 us on an H200."""
TIMEOUT_US = 60_000_000


@dataclass(frozen=True)
class Pipelined:
    """Times in us from the end of one micro-batch to the end of the next on rank 0.

    alone_*: of the computing without transfers."""

    up: int
    down: int
    rounds: int
    p50: float
    p99: float
    max: float
    alone_p50: float
    alone_p99: float
    alone_max: float


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """p50, p99 and the largest."""
    ordered = sorted(times)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def steady(ends: Sequence[float]) -> list[float]:
    """Differences of the MESSAGES ends of a replay, without those that fill the pipeline."""
    return [b - a for a, b in itertools.pairwise(ends)][DEPTH:]


class _Side:
    """One rank: its region, its link to the other, what it computes with."""

    def __init__(self, rank: int, device: int, nbytes: tuple[int, int]) -> None:
        self.rank, self.out = rank, nbytes[rank]
        name = f"cuda:{device}"
        self.region = Region(DEPTH, max(nbytes), name=f"pipeline-{rank}", device=name)
        addresses: list[list[str]] = [[], []]
        dist.all_gather_object(addresses, self.region.addresses)
        self.link = Link(addresses[1 - rank], slots=(0, DEPTH), timeout_us=TIMEOUT_US, device=name)
        m, k, n = GEMM
        self.a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        self.b = torch.randn(k, n, dtype=torch.bfloat16, device="cuda")
        self.results = [
            torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in range(DEPTH)
        ]
        self.sends = torch.cuda.Stream()
        self.compute(0)  # loads the kernel, which a waiting stream could not
        torch.cuda.synchronize()

    def compute(self, message: int) -> None:
        torch.mm(self.a, self.b, out=self.results[message % DEPTH])

    def wait(self, message: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.region.enqueue_wait(stream, [message % DEPTH], [make_flag(1, message + 1)])

    def send(self, message: int) -> None:
        """The first bytes of what was just computed."""
        slot = message % DEPTH
        self.sends.wait_stream(torch.cuda.current_stream())
        part = (0, self.results[slot].data_ptr(), self.out)
        status = self.link.enqueue(
            self.sends.cuda_stream,
            slot,
            make_flag(1, message + 1),
            0,
            slot,
            0,
            DEPTH,
            0,
            0,
            0,
            [part],
        )
        if status != Status.OK:
            raise SystemExit(f"enqueue: {status!r}")

    def graph(self, ends: list[torch.cuda.Event], *, transfers: bool) -> torch.cuda.CUDAGraph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
            for i in range(MESSAGES):
                if transfers and self.rank == 1:
                    self.wait(i)
                elif transfers and i >= DEPTH:
                    self.wait(i - DEPTH)
                self.compute(i)
                if self.rank == 0:
                    ends[i].record()
                if transfers:
                    self.send(i)
            if transfers and self.rank == 0:
                for i in range(MESSAGES - DEPTH, MESSAGES):
                    self.wait(i)
            if transfers:
                torch.cuda.current_stream().wait_stream(self.sends)
        return captured


def pipelined(rank: int, device: int, up: int, down: int, rounds: int) -> Pipelined | None:
    """Both ranks call it; rank 0 gets the result. rounds: at least so many timed micro-batches."""
    side = _Side(rank, device, (up, down))
    ends = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(MESSAGES)]
    found: list[list[float]] = []
    for transfers in (False, True):
        captured = side.graph(ends, transfers=transfers)
        dist.barrier()
        times: list[float] = []
        for replay in range(2 + -(-rounds // (MESSAGES - DEPTH - 1))):
            captured.replay()
            torch.cuda.synchronize()
            if rank == 0 and replay >= 2:  # the first ones warm up
                times += steady([1000 * ends[0].elapsed_time(end) for end in ends])
        found.append(times)
        dist.barrier()
    if rank == 1:
        return None
    alone, ours = found
    return Pipelined(up, down, len(ours), *quantiles(ours), *quantiles(alone))
