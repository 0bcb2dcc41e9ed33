"""The two processes of `afd bench comm --device cuda`: rank 0 is attention, rank 1 is the FFN.

A round is one message up and one down, enqueued in order on a stream; no host waits inside a round.
Rank 0 records an event after every round. The ways to do a round:

ipc     afd_comm: copy engine, doorbell, wait on the stream
copies  two bare copies by rank 0, up and down, without notification: the limit of the link
nccl    send and recv of torch.distributed
"""

from __future__ import annotations

import ctypes
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from afd_bench.comm_gpu_pipeline_torch import pipelined
from afd_comm import Link, Message, Region, Status, make_flag

GRAPH_ROUNDS = 50
"""Rounds of one captured graph."""
EAGER_ROUNDS = 200
"""Rounds enqueued before the host waits; the driver's queue holds them all."""
SKIPPED = 2
"""First rounds of a batch, which are not timed: the two sides start at different moments."""
AHEAD_CYCLES = 8_000_000
"""GPU clock cycles (4 ms) that rank 0's stream sleeps at the start of an eager batch. The host
enqueues the batch meanwhile, so that only the GPU is timed."""
GEMM = 8192
GEMMS = 20
LONG, SHORT = 30, 6
"""Graph replays that run concurrently with the GEMMs: longer than all GEMMs, and much shorter."""
REPEATS = 3
TIMEOUT_US = 60_000_000


@dataclass(frozen=True)
class Cell:
    """Round trips of one way, mode ("eager" or "graph") and size; times in us."""

    way: str
    mode: str
    up: int
    down: int
    rounds: int
    p50: float
    mean: float
    p99: float
    max: float


@dataclass(frozen=True)
class Contention:
    """Median times of a GEMM and of a way's rounds, each alone and while the other runs ("loaded").

    kernels: kernels that GRAPH_ROUNDS rounds launch, counted by the profiler.
    """

    way: str
    gemm_alone_ms: float
    gemm_loaded_ms: float
    round_alone_us: float
    round_loaded_us: float
    kernels: int


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    sizes: bytes (up, down). rounds: per size. contended: bytes (up, down) of the rounds in the
    contention and in-flight measurements. pipelined: rounds of the in-flight measurement.
    """

    sizes: tuple[tuple[int, int], ...]
    rounds: tuple[int, ...]
    devices: tuple[int, int]
    ways: tuple[str, ...]
    contended: tuple[int, int]
    pipelined: int


class Ipc:
    """AFD's ipc transport. Flags count the rounds, and the slots alternate."""

    name = "ipc"

    def __init__(self, rank: int, device: int, nbytes: int) -> None:
        self.rank = rank
        self.region = Region(2, nbytes, name=f"bench-{rank}", device=f"cuda:{device}")
        addresses: list[list[str]] = [[], []]
        dist.all_gather_object(addresses, self.region.addresses)
        self.link = Link(
            addresses[1 - rank], slots=(0, 2), timeout_us=TIMEOUT_US, device=f"cuda:{device}"
        )
        self.data = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
        self.stream = torch.cuda.current_stream().cuda_stream

    def round(self, number: int, up: int, down: int) -> None:
        slot, flag = number % 2, make_flag(1, number + 1)
        if self.rank == 0:
            self._send(slot, flag, up)
            self.region.enqueue_wait(self.stream, [slot], [flag])
        else:
            self.region.enqueue_wait(self.stream, [slot], [flag])
            self._send(slot, flag, down)

    def _send(self, slot: int, flag: int, nbytes: int) -> None:
        parts = [(0, self.data.data_ptr(), nbytes)]
        status = self.link.enqueue(self.stream, Message(slot, parts), flag)
        if status != Status.OK:
            raise SystemExit(f"enqueue failed with {status!r}; see the other rank's message")


class Copies:
    name = "copies"

    def __init__(self, rank: int, device: int, peer: int, nbytes: int) -> None:
        self.rank = rank
        self.stream = torch.cuda.current_stream().cuda_stream
        if rank == 0:
            self.here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
            self.there = [torch.zeros(nbytes, dtype=torch.uint8, device=peer) for _ in range(2)]
            self.there[0].copy_(self.here[0])  # makes torch enable peer access in both directions
            self.here[1].copy_(self.there[1])
            self.copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
            self.copy.argtypes = [
                ctypes.c_uint64,
                ctypes.c_uint64,
                ctypes.c_size_t,
                ctypes.c_void_p,
            ]

    def round(self, number: int, up: int, down: int) -> None:
        if self.rank == 0:
            failed = self.copy(
                self.there[0].data_ptr(), self.here[0].data_ptr(), up, self.stream
            ) or self.copy(self.here[1].data_ptr(), self.there[1].data_ptr(), down, self.stream)
            if failed:
                raise SystemExit(f"cuMemcpyAsync failed with CUDA error {failed}")


class Nccl:
    name = "nccl"

    def __init__(self, rank: int, nbytes: int) -> None:
        self.rank = rank
        self.group = dist.new_group(backend="nccl")
        self.out = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self.into = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self.round(0, 64, 64)  # connects

    def round(self, number: int, up: int, down: int) -> None:
        if self.rank == 0:
            dist.send(self.out[:up], 1, group=self.group)
            dist.recv(self.into[:down], 1, group=self.group)
        else:
            dist.recv(self.into[:up], 0, group=self.group)
            dist.send(self.out[:down], 0, group=self.group)


Way = Ipc | Copies | Nccl


def batches(rounds: int, size: int) -> Iterator[int]:
    """Yields the first round number of each batch, for ``rounds`` timed rounds in total."""
    for i in range(-(-rounds // (size - SKIPPED))):
        yield i * size


def eager(way: Way, rank: int, up: int, down: int, rounds: int) -> list[float]:
    """Returns round-trip times in us on rank 0, and [] on rank 1."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(EAGER_ROUNDS)]
    times: list[float] = []
    for first in batches(rounds, EAGER_ROUNDS):
        if rank == 0:
            torch.cuda._sleep(AHEAD_CYCLES)
        for i, event in enumerate(events):
            way.round(first + i, up, down)
            if rank == 0:
                event.record()
        torch.cuda.synchronize()
        if rank == 0:
            times += gaps(events)
    return times


def graph(way: Way, rank: int, up: int, down: int, rounds: int) -> list[float]:
    """As :func:`eager`, but both sides replay a captured graph that includes the events."""
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(GRAPH_ROUNDS)]
    captured = capture(way, up, down, after=lambda i: events[i].record() if rank == 0 else None)
    dist.barrier()
    times: list[float] = []
    for _ in batches(rounds, GRAPH_ROUNDS):
        captured.replay()
        torch.cuda.synchronize()
        if rank == 0:
            times += gaps(events)
    return times


def capture(
    way: Way, up: int, down: int, after: Callable[[int], None] = lambda i: None
) -> torch.cuda.CUDAGraph:
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
        for i in range(GRAPH_ROUNDS):
            way.round(i, up, down)
            after(i)
    return captured


def gaps(events: list[torch.cuda.Event]) -> list[float]:
    timed = events[SKIPPED - 1 :]
    return [1000 * a.elapsed_time(b) for a, b in itertools.pairwise(timed)]


def contention(way: Way, rank: int, up: int, down: int) -> Contention | None:
    """Measures how rounds and a large GEMM slow each other down; returns None on rank 1."""
    captured = capture(way, up, down)
    dist.barrier()
    if rank == 1:
        for _ in range(REPEATS * (LONG + 2 * SHORT) + 1):
            captured.replay()
        torch.cuda.synchronize()
        return None
    a, b = (torch.randn(GEMM, GEMM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out, stream = torch.empty_like(a), torch.cuda.Stream()

    def times(gemms: int, replays: int) -> tuple[float, float]:
        """Returns ms per GEMM and us per round; both start together."""
        begin, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        stream.wait_event(begin)
        # GEMMs first: launching a graph takes the host about as long as running it takes the GPU.
        with torch.cuda.stream(stream):
            for _ in range(gemms):
                torch.mm(a, b, out=out)
            end.record()
        for _ in range(replays):
            captured.replay()
        last.record()
        torch.cuda.synchronize()
        rounds = max(1, replays * GRAPH_ROUNDS)
        return begin.elapsed_time(end) / max(1, gemms), 1000 * begin.elapsed_time(last) / rounds

    times(5 * GEMMS, 0)  # warms the GPU up
    cases = {
        "gemm": (GEMMS, 0),
        "both": (GEMMS, LONG),
        "round": (0, SHORT),
        "short": (GEMMS, SHORT),
    }
    found = {name: [times(*case) for _ in range(REPEATS)] for name, case in cases.items()}
    middle = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    return Contention(
        way.name,
        middle["gemm"][0],
        middle["both"][0],
        middle["round"][1],
        middle["short"][1],
        kernels_of(captured),
    )


def kernels_of(captured: torch.cuda.CUDAGraph) -> int:
    """Counts the kernels that one replay launches."""
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profile:
        captured.replay()
        torch.cuda.synchronize()
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Context", "Event", "Stream"))
        for event in profile.events()
    )


def measure(rank: int, settings: Settings, out: str) -> None:
    """Runs one of the two processes. Rank 0 writes the results to the file ``out``."""
    device, peer = settings.devices[rank], settings.devices[1 - rank]
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{out}.meeting", rank=rank, world_size=2)
    nbytes = max(max(size) for size in settings.sizes)
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.cuda._sleep(1)
    make: dict[str, Callable[[], Way]] = {
        "ipc": lambda: Ipc(rank, device, nbytes),
        "copies": lambda: Copies(rank, device, peer, nbytes),
        "nccl": lambda: Nccl(rank, nbytes),
    }
    ways = [make[name]() for name in settings.ways]
    torch.cuda.synchronize()
    cells, contentions = [], []
    for (up, down), rounds in zip(settings.sizes, settings.rounds, strict=True):
        for way in ways:
            for mode in (eager, graph):
                dist.barrier()
                mode(way, rank, up, down, 2 * GRAPH_ROUNDS)  # warm up
                dist.barrier()
                times = mode(way, rank, up, down, rounds)
                if rank == 0:
                    cells.append(cell(way.name, mode.__name__, up, down, times))
                    print(cells[-1], flush=True)
    for way in ways:
        if not isinstance(way, Copies):
            dist.barrier()
            one = contention(way, rank, *settings.contended)
            if one is not None:
                contentions.append(one)
                print(one, flush=True)
    in_flight = None
    if "ipc" in settings.ways:
        in_flight = pipelined(rank, device, *settings.contended, settings.pipelined)
    if rank == 0:
        found = {
            "cells": [asdict(c) for c in cells],
            "contentions": [asdict(b) for b in contentions],
            "pipelined": [asdict(p) for p in [in_flight] if p is not None],
        }
        print(found["pipelined"], flush=True)
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()


def cell(way: str, mode: str, up: int, down: int, times: list[float]) -> Cell:
    ordered = sorted(times)
    p50, p99 = (ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.99))
    return Cell(way, mode, up, down, len(ordered), p50, statistics.fmean(ordered), p99, ordered[-1])


if __name__ == "__main__":
    mp.spawn(measure, (Settings(**json.loads(sys.argv[1])), sys.argv[2]), nprocs=2)
