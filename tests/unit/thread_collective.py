"""Collectives for FFN ranks that are threads of one process.

gloo is made for processes: it can crash if two threads create groups at the same time.
"""

import threading
from typing import ClassVar

import torch

from afd.errors import PeerLost
from afd.schedule import row_shares
from ffn_worker.allreduce.base import Alone, Collective

DEADLINE_S = 1.5


class _Meeting:
    def __init__(self, world):
        self.barrier = threading.Barrier(world)
        self.parts = [None] * world
        self.left = 0


class ThreadCollective(Collective):
    """Adds in float32, in rank order. Ranks with the same ``address`` form a group."""

    _meetings: ClassVar[dict[str, _Meeting]] = {}
    _lock = threading.Lock()

    def __init__(self, rank, world, address):
        super().__init__(rank, world)
        self._address = address
        with self._lock:
            self._meeting = self._meetings.setdefault(address, _Meeting(world))
        try:
            self._wait(10.0)
        except PeerLost:
            self.close()
            raise

    def all_reduce(self, x):
        parts = self._everyones(x)
        return torch.stack([part.float() for part in parts]).sum(0).to(x.dtype)

    def reduce_scatter(self, x):
        start, end = row_shares(len(x), self.world)[self.rank]
        return self.all_reduce(x)[start:end]

    def all_gather(self, x, rows):
        return torch.cat(self._everyones(x))

    def close(self):
        self._meeting.barrier.abort()
        with self._lock:
            self._meeting.left += 1
            if self._meeting.left == self.world:  # another test may use the same port
                del self._meetings[self._address]

    def _everyones(self, x):
        self._meeting.parts[self.rank] = x.clone()
        self._wait(DEADLINE_S)
        parts = list(self._meeting.parts)
        self._wait(DEADLINE_S)
        assert len({part.shape[1:] for part in parts}) == 1
        return parts

    def _wait(self, timeout_s):
        try:
            self._meeting.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise PeerLost(f"rank {self.rank} of {self.world}: another rank is gone") from None


def meet(rank, world, address):
    return Alone() if world == 1 else ThreadCollective(rank, world, address)
