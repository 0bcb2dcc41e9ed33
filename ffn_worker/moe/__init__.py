"""MoE backends by name. A new backend is one file and one line here."""

import torch

from afd.errors import ConfigError
from ffn_worker.moe.aiter import AiterBackend
from ffn_worker.moe.base import Linear, MoeBackend
from ffn_worker.moe.deep_gemm import DeepGemmBackend
from ffn_worker.moe.grouped import GroupedBackend
from ffn_worker.moe.hopper import HopperBackend
from ffn_worker.moe.quantise import Scheme
from ffn_worker.moe.reference import ReferenceBackend
from ffn_worker.moe.torch_grouped import TorchBackend
from ffn_worker.moe.triton import TritonBackend
from ffn_worker.moe.vllm_cpu import VllmCpuBackend
from ffn_worker.moe.vllm_cuda import VllmCudaBackend

__all__ = ["AUTO_ORDER", "BACKENDS", "Linear", "MoeBackend", "Scheme", "choose_backend"]

BACKENDS: dict[str, type[MoeBackend]] = {
    "reference": ReferenceBackend,
    "torch": TorchBackend,
    "vllm_cpu": VllmCpuBackend,
    "vllm_cuda": VllmCudaBackend,
    "aiter": AiterBackend,
    "hopper": HopperBackend,
    "deep_gemm": DeepGemmBackend,
    "grouped": GroupedBackend,
    "triton": TritonBackend,
}
AUTO_ORDER = ("vllm_cpu", "hopper", "vllm_cuda", "aiter", "triton", "torch")
"""For plain weights, vLLM's kernels first: both sides of a deployment then round the same way. On
Hopper only where nothing was measured to be quicker."""
AUTO_QUANTISED = ("aiter", "hopper", "triton", "torch")
"""For quantised weights, what multiplies rows as the wire brings them."""
_CPU = torch.device("cpu")


def choose_backend(
    name: str,
    dtype: torch.dtype,
    hidden: int,
    intermediate: int,
    device: torch.device = _CPU,
    scheme: Scheme = Scheme.PLAIN,
) -> str:
    """Name of the backend to use; "auto" takes the first that can run, of AUTO_ORDER
    for plain weights and of AUTO_QUANTISED for others.

    Args:
        dtype: serving dtype; hidden, intermediate: H and I of the routed experts.
        device: where it is to run. scheme: of the weights.

    Raises:
        ConfigError: unknown name, or the named backend cannot run here.
    """

    def problem(backend: type[MoeBackend]) -> str | None:
        if device.type not in backend.devices:
            return f"it runs on {' and '.join(backend.devices)}, not on {device.type}"
        if scheme not in backend.schemes:
            known = " and ".join(s.value for s in backend.schemes)
            return f"it takes {known} weights, not {scheme.value} (ffn.weights)"
        return backend.unavailable(dtype, hidden, intermediate)

    if name == "auto":
        order = AUTO_ORDER if scheme is Scheme.PLAIN else AUTO_QUANTISED
        return next(n for n in order if problem(BACKENDS[n]) is None)
    if name not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"MoE backend {name!r} is not known; use one of {known}")
    reason = problem(BACKENDS[name])
    if reason is not None:
        raise ConfigError(f"MoE backend {name} cannot run: {reason}; use the backend torch")
    return name
