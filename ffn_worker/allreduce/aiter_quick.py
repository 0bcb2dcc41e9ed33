"""Quantised all-reduce through AITER's or vLLM's QuickAllReduce, for AMD Instinct.

Verified by signature only (AITER e4048607, vLLM 0.26): see docs/amd.md. The two classes are alike
but number their formats differently (level 1 is FP8 in AITER, INT8 in vLLM), so a format travels by
name: both read it from an environment variable when the communicator is made.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch.distributed import ProcessGroup

from afd.errors import ConfigError


class Provider(Enum):
    """Whose implementation; the value is the prefix of its environment variables."""

    AITER = "AITER_QUICK_REDUCE"
    VLLM = "VLLM_ROCM_QUICK_REDUCE"


FORMATS = {
    Provider.AITER: ("FP", "FP8", "INT6", "INT4", "INT3"),
    Provider.VLLM: ("FP", "INT8", "INT6", "INT4", "INT3"),
}


class QuickAllReduceBackend:
    """All-reduce of messages above the provider's crossover; smaller ones are the caller's.

    Args:
        group: a non-NCCL group of 2, 4 or 8 ranks of one host.
        device: this rank's GPU.
        name: a format of ``FORMATS[provider]``.

    Raises:
        ConfigError: a format that the provider does not have, or the provider refused the group.
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
                "MI350 of one host and a non-NCCL group"
            )

    def takes(self, x: torch.Tensor) -> bool:
        """Whether a message of this size and dtype is worth it, by the provider's table."""
        return self._communicator.should_quick_allreduce(x)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over the group, into ``out`` or a new tensor. ``takes(x)`` must hold."""
        return self._communicator.quick_all_reduce(x, out=out)


def unavailable(provider: Provider) -> str | None:
    """Why the provider cannot be used here, None when it can."""
    package = {Provider.AITER: "aiter", Provider.VLLM: "vllm"}[provider]
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return None if torch.version.hip else "PyTorch is no ROCm build"


def _communicator(provider: Provider, group: ProcessGroup, device: torch.device):
    if provider is Provider.AITER:
        from aiter.dist.device_communicators.quick_all_reduce import QuickAllReduce

        return QuickAllReduce(group, device)
    from vllm.distributed.device_communicators.quick_all_reduce import (
        QuickAllReduce as VllmQuickAllReduce,
    )

    return VllmQuickAllReduce(group, device)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable while a communicator is made; both providers read theirs only then, AITER
    also on import."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
