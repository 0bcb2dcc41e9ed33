"""Measures how much time transfers add to computation with three micro-batches in flight.

Rank 0 (attention) and rank 1 (FFN) each compute about 100 us per micro-batch. Rank 0 computes a
micro-batch again once its answer arrives. Sends use a separate stream, as in a real layer. The
metric is the time between the ends of consecutive micro-batches on rank 0, with transfers and for
the same graph without sends and waits.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from afd_comm import Link, Message, Region, Status, make_flag

DEPTH = 3
MESSAGES = 20 * DEPTH
"""Messages of one captured graph. A replay fills and drains the pipeline; only the steady part in
between is timed."""
GEMM = (4096, 2048, 4096)
"""M, K, N of a bfloat16 matrix product that takes about 100 us on an H200."""
TIMEOUT_US = 60_000_000


@dataclass(frozen=True)
class Pipelined:
    """Times in us from the end of one micro-batch to the end of the next on rank 0.

    up, down: bytes of a request and of an answer. alone_*: the same graph without transfers.
    """

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
    """Returns p50, p99 and the maximum."""
    ordered = sorted(times)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def steady(ends: Sequence[float]) -> list[float]:
    """Returns the differences of consecutive ``ends`` after the pipeline is full."""
    return [b - a for a, b in itertools.pairwise(ends)][DEPTH:]


class _Side:
    """One rank: its receive region, its link to the other rank, and the operands of its product."""

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
        self.compute(0)  # loads the kernel; loading it while a stream waits would deadlock
        torch.cuda.synchronize()

    def compute(self, message: int) -> None:
        torch.mm(self.a, self.b, out=self.results[message % DEPTH])

    def wait(self, message: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.region.enqueue_wait(stream, [message % DEPTH], [make_flag(1, message + 1)])

    def send(self, message: int) -> None:
        """Sends the first bytes of the product that was just computed."""
        slot = message % DEPTH
        self.sends.wait_stream(torch.cuda.current_stream())
        part = (0, self.results[slot].data_ptr(), self.out)
        status = self.link.enqueue(
            self.sends.cuda_stream, Message(slot, [part]), make_flag(1, message + 1)
        )
        if status != Status.OK:
            raise SystemExit(f"enqueue failed with {status!r}; see the other rank's message")

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
    """Measures; both ranks call it. Returns the result on rank 0 and None on rank 1.

    rounds: least number of timed micro-batches.
    """
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
            if rank == 0 and replay >= 2:  # the first two replays warm up
                times += steady([1000 * ends[0].elapsed_time(end) for end in ends])
        found.append(times)
        dist.barrier()
    if rank == 1:
        return None
    alone, ours = found
    return Pipelined(up, down, len(ours), *quantiles(ours), *quantiles(alone))
