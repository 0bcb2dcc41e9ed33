"""One rank of the all-reduce tests: ``python allreduce_rank.py CHECK RANK WORLD FOLDER``.

Every check is a function of this file; all ranks run it, and a failure ends the process with a
traceback. Each rank generates the inputs of all ranks and computes the reference on the CPU.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from afd.errors import DeadlineExceeded, PeerLost
from ffn_worker.allreduce import formats_torch
from ffn_worker.allreduce.base import Setup, row_shares
from ffn_worker.allreduce.crossover import DEFAULT, read_crossover
from ffn_worker.allreduce.formats_table import FORMATS, FP16, INT4, ReduceFormat
from ffn_worker.allreduce.nccl import NcclCollective
from ffn_worker.allreduce.quickreduce import QuickReduceCollective

HIDDEN = 7168
DEADLINE_S = 1.0


def quickreduce(
    rank: int, world: int, folder: str, deadline_s: float = 60.0
) -> QuickReduceCollective:
    device = torch.device("cuda", rank)
    exact = Setup(rank, world, None, f"file://{folder}/store", device, deadline_s=deadline_s)
    crossover = read_crossover(DEFAULT, world, "bfloat16", "int4")
    return QuickReduceCollective(
        replace(exact, fmt=INT4), crossover, NcclCollective(exact), room=FP16
    )


def inputs(world: int, rows: int, hidden: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Returns every rank's rows on the CPU, including zeros, tiny and huge blocks, and a NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(world, rows * hidden, generator=generator)
    x[:, :64], x[:, 64:128] = 0, -0.0
    x[:, 128:192] *= 2e-5
    x[:, 192:256] *= 15000
    x[:1, 300:301] = torch.nan
    return list(x.to(dtype).view(world, rows, hidden))


def reference(xs: list[torch.Tensor], fmt: ReduceFormat | None, *, gather: bool) -> torch.Tensor:
    n, dtype = xs[0].numel(), xs[0].dtype
    if fmt is None:
        total = xs[0].float()
        for x in xs[1:]:
            total = total + x.float()
        return total.to(dtype)
    total = formats_torch.decode_sum(
        torch.stack([formats_torch.encode(x, fmt) for x in xs]), n, fmt
    )
    if gather:
        total = formats_torch.decode(formats_torch.encode(total, fmt), n, fmt, torch.float16)
    return total.to(dtype).view(xs[0].shape)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Asserts equal bits, except the sign of zeros: max(-0, 0) depends on the hardware."""
    got = got.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    integer = torch.int32 if want.element_size() == 4 else torch.int16
    finite = ~(want.isnan() | ((want == 0) & (got == 0)))
    different = got.view(integer)[finite] != want.view(integer)[finite]
    assert not different.any(), f"{different.sum()} of {want.numel()} values differ"


def sums_in(fmt: ReduceFormat | None, rank: int, world: int, folder: str) -> None:
    """One format (None: exact), with every dtype and kind of size, equals the reference bitwise."""
    ours = quickreduce(rank, world, folder)
    shapes = [(1, 64), (3, HIDDEN), (world * 16 + 1, HIDDEN), (1024, HIDDEN)]
    for seed, (rows, hidden) in enumerate(shapes):
        dtypes = (torch.bfloat16, torch.float16, torch.float32)[: 2 if fmt is None else 3]
        for dtype in dtypes[: 3 if seed < 3 else 1]:
            xs = inputs(world, rows, hidden, dtype, seed)
            got = ours.two_shot(xs[rank].cuda(), fmt)
            same(got, reference(xs, fmt, gather=True))
            start, end = row_shares(rows, world)[rank]
            got = ours.two_shot_scatter(xs[rank].cuda(), fmt)
            if end > start:
                same(got, reference([x[start:end] for x in xs], fmt, gather=False))
            ours.check()
    ours.close()


def one_shot(rank: int, world: int, folder: str) -> None:
    """Repeated one-shot sums use both halves of the inboxes, with changing sizes."""
    ours = quickreduce(rank, world, folder)
    for seed in range(20):
        xs = inputs(world, 1 + seed % 7, HIDDEN, torch.bfloat16, seed)
        same(ours.one_shot(xs[rank].cuda()), reference(xs, None, gather=True))
    ours.check()
    ours.close()


def library(rank: int, world: int, folder: str) -> None:
    """NCCL behind the same interface, including uneven shares."""
    device = torch.device("cuda", rank)
    ours = NcclCollective(Setup(rank, world, None, f"file://{folder}/store", device))
    for rows in (0, 1, world, 4 * world + 1):
        xs = [torch.full((rows, 512), float(r + 1)).bfloat16() for r in range(world)]
        want = torch.full((rows, 512), world * (world + 1) / 2).bfloat16()
        start, end = row_shares(rows, world)[rank]
        same(ours.all_reduce(xs[rank].cuda()), want)
        same(ours.reduce_scatter(xs[rank].cuda()), want[start:end])
        everything = torch.arange(rows * 512).float().view(rows, 512)
        same(ours.all_gather(everything[start:end].cuda(), rows), everything)
    ours.close()


def graph(rank: int, world: int, folder: str) -> None:
    """100 replays of a graph that reduces four times, with new inputs each time."""
    ours = quickreduce(rank, world, folder)
    shape = (world * 8 + 1, 2048)
    x = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    for fmt in (INT4, FP16):
        ours.two_shot(x[0], fmt)  # compiles
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        ours.two_shot(x[0], INT4)
        ours.one_shot(x[1][:2])
        ours.two_shot(x[2], FP16)
        ours.one_shot(x[3][:3])
    for replay in range(100):
        xs = [inputs(world, *shape, torch.bfloat16, 1000 * replay + i) for i in range(4)]
        for i in range(4):
            x[i].copy_(xs[i][rank])
        captured.replay()
        same(x[0], reference(xs[0], INT4, gather=True))
        same(x[1][:2], reference([y[:2] for y in xs[1]], None, gather=True))
        same(x[2], reference(xs[2], FP16, gather=True))
        same(x[3][:3], reference([y[:3] for y in xs[3]], None, gather=True))
    ours.check()
    ours.close()


def lost(rank: int, world: int, folder: str, last_act=lambda: os._exit(0)) -> None:
    """The last rank stops: all others raise within the deadline, and their GPUs stay usable."""
    ours = quickreduce(rank, world, folder, DEADLINE_S)
    x = torch.ones((64, HIDDEN), dtype=torch.bfloat16, device="cuda")
    ours.two_shot(x, INT4)
    torch.cuda.synchronize()
    if rank == world - 1:
        last_act()
        return
    time.sleep(0.5)
    start = time.monotonic()
    expected = PeerLost if last_act is not _stop else DeadlineExceeded
    for _ in range(10):  # ten sums, as of ten layers, share one deadline
        ours.two_shot(x, INT4)
    torch.cuda.synchronize()
    try:
        ours.check()
    except expected as err:
        assert f"rank {world - 1}" in str(err), err
    else:
        raise AssertionError("the lost rank was not detected")
    assert time.monotonic() - start < 3 * DEADLINE_S
    assert torch.ones(4, device="cuda").sum().item() == 4
    print(f"{time.monotonic() - start:.2f} s", flush=True)
    # Wait for the others: a rank that exits early would look lost to them.
    Path(folder, f"noticed-{rank}").touch()
    while len(list(Path(folder).glob("noticed-*"))) < world - 1:
        time.sleep(0.01)
    os._exit(0)  # the other rank is gone


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(rank: int, world: int, folder: str) -> None:
    lost(rank, world, folder, _stop)


CHECKS = {f.__name__: f for f in (one_shot, library, graph, lost, stopped)}
CHECKS |= {name: partial(sums_in, fmt) for name, fmt in {"exact": None, **FORMATS}.items()}

if __name__ == "__main__":
    check, own_rank, ranks, path = sys.argv[1:]
    torch.set_num_threads(2)  # for the references; ranks and other tests share the cores
    torch.cuda.set_device(int(own_rank))
    CHECKS[check](int(own_rank), int(ranks), path)
