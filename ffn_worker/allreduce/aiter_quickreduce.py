"""Quantised all-reduce through AITER's or vLLM's QuickAllReduce, for AMD Instinct.

Verified by signature only (AITER e4048607, vLLM 0.26): see docs/amd.md. The two classes have the
same interface but number their formats differently: level 1 is FP8 in AITER and INT8 in vLLM. So a
format is given by name. Both read it from an environment variable when the communicator is made.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from afd.errors import ConfigError
from ffn_worker.allreduce.base import Collective, Setup, row_shares
from ffn_worker.allreduce.formats_table import FP16, INT4, INT6, INT8
from ffn_worker.allreduce.nccl import NcclCollective


class Provider(Enum):
    """Implementation of QuickAllReduce; the value is the prefix of its environment variables."""

    AITER = "AITER_QUICK_REDUCE"
    VLLM = "VLLM_ROCM_QUICK_REDUCE"


FORMATS = {
    Provider.AITER: ("FP", "FP8", "INT6", "INT4", "INT3"),
    Provider.VLLM: ("FP", "INT8", "INT6", "INT4", "INT3"),
}

NAMES = {FP16: "FP", INT8: "INT8", INT6: "INT6", INT4: "INT4"}
"""The providers' names of our formats; neither has FP4."""


class AiterQuickReduceCollective(Collective):
    """See :class:`Collective`.

    Sums above the provider's crossover use QuickAllReduce. Everything else goes through RCCL. The
    provider is AITER, or vLLM for formats that AITER does not have. Neither has a reduce-scatter,
    so :meth:`reduce_scatter` sums everything on every rank: it sends twice the bytes of quickreduce
    and rounds twice.

    Raises:
        ConfigError: the setup is exact, no provider has the format, or the provider is not
            installed or refuses the GPUs.
    """

    name = "aiter_quickreduce"
    capturable = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.rank, setup.world)
        fmt = setup.fmt
        if fmt not in NAMES:
            known = ", ".join(f.name for f in NAMES)
            raise ConfigError(
                f"aiter_quickreduce has no all-reduce format {setup.fmt_name}; use one of {known}, "
                "or the all-reduce quickreduce or nccl"
            )
        name = NAMES[fmt]
        provider = next(p for p in Provider if name in FORMATS[p])
        problem = unavailable(provider)
        if problem is not None:
            raise ConfigError(
                f"the all-reduce aiter_quickreduce cannot run: {problem}; use quickreduce"
            )
        self._library = NcclCollective(replace(setup, fmt=None))
        group = dist.new_group(backend="gloo")
        self._quick = QuickAllReduceBackend(group, setup.device, name, provider)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.check()
        return self._quick(x) if self._quick.takes(x) else self._library.all_reduce(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if not self._quick.takes(x):
            return self._library.reduce_scatter(x)
        self.check()
        start, end = row_shares(len(x), self.world)[self.rank]
        return self._quick(x)[start:end]

    def all_gather(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return self._library.all_gather(x, rows)

    def check(self) -> None:
        self._library.check()

    def close(self) -> None:
        self._library.close()


class QuickAllReduceBackend:
    """All-reduce of messages above the provider's crossover. The caller handles smaller ones.

    Args:
        group: a non-NCCL group of 2, 4 or 8 ranks on one host.
        device: this rank's GPU.
        name: a format of ``FORMATS[provider]``.

    Raises:
        ConfigError: the provider does not have the format, or refuses the group.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        name: str,
        provider: Provider = Provider.AITER,
    ) -> None:
        if name not in FORMATS[provider]:
            raise ConfigError(
                f"{provider.name} has no all-reduce format {name}; use one of "
                f"{', '.join(FORMATS[provider])}"
            )
        with _environment(f"{provider.value}_QUANTIZATION", name):
            self._communicator = _communicator(provider, group, device)
        if self._communicator.disabled:
            raise ConfigError(
                f"{provider.name} QuickAllReduce refused this group; it needs 2, 4 or 8 MI300 or "
                "MI350 on one host and a non-NCCL group"
            )

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the provider's table prefers QuickAllReduce for this size and dtype."""
        takes: bool = self._communicator.should_quick_allreduce(x)
        return takes

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sum over the group, in ``out`` or a new tensor. Requires ``takes(x)``."""
        total: torch.Tensor = self._communicator.quick_all_reduce(x, out=out)
        return total


def make(setup: Setup, table: Path | None) -> Collective:
    """See :class:`ffn_worker.allreduce.registry.Make`; the crossover is the provider's own."""
    return AiterQuickReduceCollective(setup)


def unavailable(provider: Provider) -> str | None:
    """Why the provider cannot be used here, None if it can."""
    package = {Provider.AITER: "aiter", Provider.VLLM: "vllm"}[provider]
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return None if torch.version.hip else "PyTorch is not a ROCm build"


def _communicator(provider: Provider, group: ProcessGroup, device: torch.device) -> Any:
    if provider is Provider.AITER:
        from aiter.dist.device_communicators.quick_all_reduce import QuickAllReduce

        return QuickAllReduce(group, device)
    from vllm.distributed.device_communicators.quick_all_reduce import (
        QuickAllReduce as VllmQuickAllReduce,
    )

    return VllmQuickAllReduce(group, device)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable while a communicator is made.

    Both providers read theirs only then; AITER reads it also on import.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
