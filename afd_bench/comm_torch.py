"""The way "gloo" of `afd bench comm`: PyTorch's CPU transport."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist


class Gloo:
    """send and recv between two ranks, in a Python loop; a :class:`afd_bench.comm_ways.Way`."""

    def __init__(self, side: int, most: int, swap: Callable[[object], object]) -> None:
        self._side = side
        self._buffer = torch.empty(most, dtype=torch.uint8)
        wait = datetime.timedelta(seconds=30)
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait, False) if side == 0 else None
        port = swap(store.port if store else None)
        if store is None:
            store = dist.TCPStore("127.0.0.1", int(str(port)), 2, False, wait)
        dist.init_process_group("gloo", store=store, rank=side, world_size=2, timeout=wait)

    def bounce(
        self, mine: npt.NDArray[np.uint8], theirs: int, rounds: int
    ) -> npt.NDArray[np.int64]:
        out, into, other = torch.from_numpy(mine), self._buffer[:theirs], 1 - self._side
        times = np.zeros(rounds, np.int64)
        for i in range(rounds):
            start = time.perf_counter_ns()
            if self._side == 0:
                dist.send(out, other)
            dist.recv(into, other)
            times[i] = time.perf_counter_ns() - start
            if self._side == 1:
                dist.send(out, other)
        return times

    def close(self) -> None:
        dist.destroy_process_group()
