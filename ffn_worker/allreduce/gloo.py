"""Collectives among CPU ranks through gloo, exact or in the lossy formats of quickreduce.

Every rank sends its rows once and computes the whole sum itself. On CPUs, with small messages and
few ranks, one exchange costs less than two of half the size. The result has the bits of the
two-shot reduction of quickreduce: decode, add in rank order, encode again.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Work

from ffn_worker.allreduce import formats_torch
from ffn_worker.allreduce.base import Collective, Setup, row_shares
from ffn_worker.allreduce.rendezvous import host_of, named_errors, open_store

_Gloo: Any = ProcessGroupGloo
"""Untyped, because torch's stubs lack most of its members."""


class GlooCollective(Collective):
    """See :class:`Collective`. Exact sums: added in float32 in rank order, rounded once."""

    name = "gloo"

    def __init__(self, setup: Setup) -> None:
        rank, world, start_s = setup.rank, setup.world, setup.start_s
        super().__init__(rank, world)
        self._fmt = setup.fmt
        self._deadline_s = setup.deadline_s
        store = open_store(setup.address, rank, world, start_s)
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=host_of(setup.address))]
        options._timeout = timedelta(seconds=start_s)
        with named_errors("connecting to the other ranks", rank, world, start_s):
            self._group = _Gloo(store, rank, world, options)
            self._group.barrier().wait()
        self._group._set_default_timeout(timedelta(seconds=setup.deadline_s))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x
        if self._fmt is None:
            return _sum(self._gather_from_all(x)).to(x.dtype)
        data = self._gather_from_all(formats_torch.encode(x, self._fmt))
        total = formats_torch.decode_sum(data, x.numel(), self._fmt)
        again = formats_torch.encode(total, self._fmt)
        return formats_torch.decode(again, x.numel(), self._fmt, x.dtype).view(x.shape)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        shares = row_shares(len(x), self.world)
        send = [x[start:end] for start, end in shares]
        if self._fmt is not None:
            send = [formats_torch.encode(part, self._fmt) for part in send]
        mine = send[self.rank]
        received = mine.new_empty((self.world * len(mine), *mine.shape[1:]))
        counts = [len(part) for part in send]
        self._exchange(received, torch.cat(send), [len(mine)] * self.world, counts)
        parts = received.view(self.world, *mine.shape)
        if self._fmt is None:
            return _sum(parts).to(x.dtype)
        start, end = shares[self.rank]
        share = x[start:end]
        total = formats_torch.decode_sum(parts, share.numel(), self._fmt)
        return total.view(share.shape).to(x.dtype)

    def all_gather(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        counts = [end - start for start, end in row_shares(rows, self.world)]
        received = x.new_empty((rows, *x.shape[1:]))
        self._exchange(received, torch.cat([x] * self.world), counts, [len(x)] * self.world)
        return received

    def close(self) -> None:
        self._group.abort()

    def _gather_from_all(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers x, of the same shape on every rank, to [world, *x.shape]."""
        received = x.new_empty((self.world, *x.shape))
        parts = [part.view(torch.uint8) for part in received]
        self._finish(self._group.allgather([parts], [x.view(torch.uint8)]))
        return received

    def _exchange(
        self, out: torch.Tensor, x: torch.Tensor, receive: list[int], send: list[int]
    ) -> None:
        """Sends ``send[r]`` rows of x to rank r, in order; receives ``receive[r]`` rows of out."""
        if out.numel() or x.numel():
            out, x = out.view(torch.uint8), x.view(torch.uint8)
            self._finish(self._group.alltoall_base(out, x, receive, send))

    def _finish(self, work: Work) -> None:
        with named_errors("in a collective", self.rank, self.world, self._deadline_s):
            work.wait()


def make(setup: Setup, table: Path | None) -> Collective:
    """See :class:`ffn_worker.allreduce.registry.Make`; there is no crossover table."""
    return GlooCollective(setup)


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """float32 sum over the first axis, in order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total
