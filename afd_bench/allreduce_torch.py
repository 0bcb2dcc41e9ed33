"""One rank of `afd bench allreduce`: ``python -m afd_bench.allreduce_torch SETTINGS RANK``.

Rank 0 writes a list of [way, bytes, us] to ``cells.json`` in the folder of the settings.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ffn_worker.allreduce.formats_table import FORMATS, INT4
from ffn_worker.allreduce.rendezvous import open_store

TURNS = 5
START_S = 180.0
SWEEP_SIZES = (1 << 20, 16 << 20, 64 << 20, 1 << 30)
SWEEP_CUTS = [
    (programs, tile_atoms, *kind)
    for counts, kind in (
        ((4, 6), (1, 4, 96)),
        ((3, 4), (2, 4, 128)),
        ((2, 3), (2, 8, 80)),
        ((2,), (4, 8, 128)),
    )
    for programs in counts
    for tile_atoms in (4, 16, 64)
]
"""Positional arguments of ffn_worker.allreduce.quickreduce_plan.Tuning."""

Way = Callable[[torch.Tensor], torch.Tensor]
Capture = Callable[[], AbstractContextManager[None]]
Cell = tuple[str, int, float]


def main() -> None:
    settings, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    run = cpu_cells if settings["device"] == "cpu" else gpu_cells
    cells = list(run(settings, rank))
    if rank == 0:
        path = Path(settings["folder"]) / "cells.json"
        path.write_text(json.dumps(cells), encoding="utf-8")


def cpu_cells(settings: dict[str, Any], rank: int) -> Iterator[Cell]:
    """Yields cells of gloo's own all-reduce and of ours in every format."""
    from ffn_worker.allreduce.selection import make_collective

    torch.set_num_threads(1)
    world, folder = settings["world"], settings["folder"]
    store = open_store(f"file://{folder}/plain", rank, world, START_S)
    timeout = timedelta(seconds=START_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)

    def plain(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    ways: dict[str, Way] = {"gloo": plain}
    collectives = []
    for name in settings["ours"]:
        address = f"file://{folder}/{name}"
        collectives.append(make_collective("gloo", name, rank, world, address, start_s=START_S))
        ways[name] = collectives[-1].all_reduce
    for nbytes in settings["sizes"]:
        x = torch.zeros(1, nbytes // 2, dtype=torch.bfloat16)
        for name, way in ways.items():
            once = _together(_seconds(way, x, 3))
            calls = max(3, min(1000, int(settings["seconds"] / TURNS / once)))
            times = [_seconds(way, x, calls) for _ in range(TURNS)]
            yield name, nbytes, _together(statistics.median(times)) * 1e6
    dist.barrier()
    for collective in collectives:
        collective.close()
    dist.destroy_process_group()


def _seconds(way: Way, x: torch.Tensor, calls: int) -> float:
    """Returns the seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        way(x)
    return (time.perf_counter() - start) / calls


def _together(value: float) -> float:
    """Returns the maximum over all ranks, so that all ranks decide and report the same."""
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most[0])


def gpu_cells(settings: dict[str, Any], rank: int) -> Iterator[Cell]:
    """Yields cells of NCCL, of vLLM's custom all-reduce (if installed) and of ours."""
    # With multicast NCCL uses other algorithms from 4 GPUs on. Ours does not use multicast, so it
    # is off for NCCL too unless the caller's environment enables it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    from ffn_worker.allreduce.base import Setup
    from ffn_worker.allreduce.crossover import Crossover
    from ffn_worker.allreduce.formats_table import FP16
    from ffn_worker.allreduce.nccl import NcclCollective
    from ffn_worker.allreduce.quickreduce import CAPACITY_BYTES, QuickReduceCollective

    world = settings["world"]
    device = torch.device("cuda", rank)
    address = f"file://{settings['folder']}/store"
    exact = Setup(rank, world, None, address, device, deadline_s=60, start_s=START_S)
    ours = QuickReduceCollective(
        replace(exact, fmt=INT4),
        Crossover(0, None),
        NcclCollective(exact),
        room=FP16,
        # The buffer has room for FP16. This capacity gives INT4 as many launches as its own buffer.
        capacity_bytes=CAPACITY_BYTES * FP16.atom_bytes // INT4.atom_bytes,
    )
    if settings["sweep"]:
        yield from sweep(ours, settings)
    else:
        yield from compare(ours, device, settings)
    ours.check()
    ours.close()


def compare(ours: Any, device: torch.device, settings: dict[str, Any]) -> Iterator[Cell]:
    def nccl(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    vllm = _vllm(device)
    for nbytes in settings["sizes"]:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        ways: dict[str, Way] = {"nccl": nccl}
        if vllm is not None and vllm.should_custom_ar(x):
            ways["vllm"] = vllm.custom_all_reduce
        if ours.fits_one_shot(x):
            ways["one_shot"] = ours.one_shot
        for name, fmt in {"exact": None, **FORMATS}.items():
            ways[name] = partial(ours.two_shot, fmt=fmt)
        for name, way in ways.items():
            capture = vllm.capture if name == "vllm" else nullcontext
            yield name, nbytes, timed(way, x, settings["seconds"], capture)


def sweep(ours: Any, settings: dict[str, Any]) -> Iterator[Cell]:
    """Yields cells of INT4 for each kernel tuning of SWEEP_CUTS, which is the cell's way."""
    from ffn_worker.allreduce.quickreduce_plan import Tuning

    for nbytes in SWEEP_SIZES:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
        for cut in SWEEP_CUTS:
            ours.tuning = Tuning(*cut)
            us = timed(lambda x: ours.two_shot(x, INT4), x, settings["seconds"], nullcontext)
            yield "x".join(str(n) for n in cut), nbytes, us


def timed(way: Way, x: torch.Tensor, seconds: float, capture: Capture) -> float:
    """Returns the us per call in a graph of many calls: the slowest rank's median of TURNS."""
    for _ in range(2):
        way(x)
    torch.cuda.synchronize()
    once = _together(_replayed(way, x, 2, capture, 1)[0])
    calls = max(2, min(200, int(seconds * 1e6 / TURNS / once)))
    return _together(statistics.median(_replayed(way, x, calls, capture, TURNS)))


def _replayed(way: Way, x: torch.Tensor, calls: int, capture: Capture, turns: int) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    with capture(), torch.cuda.graph(graph):
        for _ in range(calls):
            way(x)
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(turns + 1):  # the first replay warms up
        torch.cuda.synchronize()
        _together(0.0)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return times[1:]


def _vllm(device: torch.device) -> Any:
    """Returns vLLM's custom all-reduce; None if not installed or not supported on these GPUs."""
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError:
        return None
    made = CustomAllreduce(dist.new_group(backend="gloo"), device, max_size=64 << 20)
    return None if made.disabled else made


if __name__ == "__main__":
    main()
