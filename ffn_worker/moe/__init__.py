"""MoE backends by name. A new backend is one file and one line here."""

import torch

from afd.errors import ConfigError
from ffn_worker.moe.aiter import AiterBackend
from ffn_worker.moe.base import Linear, MoeBackend
from ffn_worker.moe.reference import ReferenceBackend
from ffn_worker.moe.torch_grouped import TorchBackend
from ffn_worker.moe.triton import TritonBackend
from ffn_worker.moe.vllm_cpu import VllmCpuBackend

__all__ = ["AUTO_ORDER", "BACKENDS", "Linear", "MoeBackend", "choose_backend"]

BACKENDS: dict[str, type[MoeBackend]] = {
    "reference": ReferenceBackend,
    "torch": TorchBackend,
    "vllm_cpu": VllmCpuBackend,
    "aiter": AiterBackend,
    "triton": TritonBackend,
}
AUTO_ORDER = ("vllm_cpu", "torch")


def choose_backend(name: str, dtype: torch.dtype, hidden: int, intermediate: int) -> str:
    """Name of the backend to use; "auto" takes the first of AUTO_ORDER that can run.

    Args:
        dtype: serving dtype; hidden, intermediate: H and I of the routed experts.

    Raises:
        ConfigError: unknown name, or the named backend cannot run here.
    """
    if name == "auto":
        usable = (n for n in AUTO_ORDER if not BACKENDS[n].unavailable(dtype, hidden, intermediate))
        return next(usable)
    if name not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"MoE backend {name!r} is not known; use one of {known}")
    reason = BACKENDS[name].unavailable(dtype, hidden, intermediate)
    if reason is not None:
        raise ConfigError(f"MoE backend {name} cannot run: {reason}; use the backend torch")
    return name
