"""Collectives through NCCL, or RCCL on ROCm. Exact; the library chooses the order of additions."""

import os
import threading
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from afd.errors import ConfigError, PeerLost
from ffn_worker.allreduce.base import Collective, Setup, row_shares
from ffn_worker.allreduce.rendezvous import named_errors, open_store
from ffn_worker.allreduce.watch import PeerWatch

_WATCH_S = 0.2


class NcclCollective(Collective):
    """See :class:`Collective`. Makes torch's default process group: at most one per process.

    If the process of a rank ends, a thread notices within ``_WATCH_S`` seconds and aborts the
    communicator. This ends waiting kernels, also captured ones. If a rank is alive but late,
    torch's own watchdog raises, except for replayed calls.

    Raises:
        ConfigError: the setup has a format; NCCL adds values as they are.
    """

    name = "nccl"
    capturable = True

    def __init__(self, setup: Setup) -> None:
        rank, world, device, start_s = setup.rank, setup.world, setup.device, setup.start_s
        super().__init__(rank, world)
        if setup.fmt is not None:
            name = setup.fmt.name
            raise ConfigError(f"nccl has no all-reduce format {name}; use quickreduce, or exact")
        if dist.is_initialized():
            raise ConfigError("this process already has a process group; make only one collective")
        self.device = device
        self.store = open_store(setup.address, rank, world, start_s)
        torch.cuda.set_device(device)
        # All ranks are on this host, and its host name may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        with named_errors("connecting to the other ranks", rank, world, start_s):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl",
                store=self.store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=start_s),
                device_id=device,
            )
            self.watch = PeerWatch(self.store, rank, world)
            dist.barrier()
        group = dist.group.WORLD
        assert group is not None  # initialised above
        self._backend = group._get_backend(device)
        self._backend._set_default_timeout(timedelta(seconds=setup.deadline_s))
        self._deadline_s = setup.deadline_s
        self._lost: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch_peers, daemon=True)
        self._thread.start()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            self.check()
            with self._named():
                dist.all_reduce(x)
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.check()
        shares = row_shares(len(x), self.world)
        longest = shares[0][1]
        if longest * self.world != len(x):  # NCCL needs shares of equal size
            padded = x.new_zeros((self.world, longest, *x.shape[1:]))
            for part, (start, end) in zip(padded, shares, strict=True):
                part[: end - start] = x[start:end]
            x = padded.flatten(0, 1)
        out = x.new_empty((longest, *x.shape[1:]))
        if out.numel():
            with self._named():
                dist.reduce_scatter_tensor(out, x)
        start, end = shares[self.rank]
        return out[: end - start]

    def all_gather(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        self.check()
        shares = row_shares(rows, self.world)
        longest = shares[0][1]
        if len(x) != longest:
            x = torch.cat([x, x.new_zeros((longest - len(x), *x.shape[1:]))])
        out = x.new_empty((self.world * longest, *x.shape[1:]))
        if out.numel():
            with self._named():
                dist.all_gather_into_tensor(out, x)
        if longest * self.world == rows:
            return out
        parts = out.view(self.world, longest, *x.shape[1:])
        return torch.cat(
            [part[: end - start] for part, (start, end) in zip(parts, shares, strict=True)]
        )

    def check(self) -> None:
        if self._lost is not None:
            raise PeerLost(
                f"rank {self.rank} of {self.world}: the process of rank {self._lost} ended; "
                "restart the instance"
            )

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self.watch.close()
        self._backend.abort()
        dist.destroy_process_group()

    def _named(self) -> AbstractContextManager[None]:
        return named_errors("in a collective", self.rank, self.world, self._deadline_s)

    def _watch_peers(self) -> None:
        while not self._closing.wait(_WATCH_S):
            lost = self.watch.lost()
            if lost is not None:
                self._lost = lost
                self._backend.abort()
                return


def make(setup: Setup, table: Path | None) -> Collective:
    """See :class:`ffn_worker.allreduce.registry.Make`; there is no crossover table."""
    return NcclCollective(setup)
