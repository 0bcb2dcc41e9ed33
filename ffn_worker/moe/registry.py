"""MoE backends by name. A new backend is one file and one line in BACKENDS. No torch."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from afd.config.choices import Choice
from ffn_worker.moe.scheme import Scheme

if TYPE_CHECKING:
    from ffn_worker.moe.base import MoeBackend

PLAIN, FP8_BLOCK, MXFP4 = Scheme.PLAIN, Scheme.FP8_BLOCK, Scheme.MXFP4


@dataclass(frozen=True)
class Backend:
    """What is known of a MoE backend before its module is imported.

    target: ``module:class`` of the :class:`~ffn_worker.moe.base.MoeBackend`, imported when it is
    used. devices: names of the devices that it runs on; empty: any. schemes: weight formats that it
    takes. any_math: takes every activation and biases
    (:class:`~ffn_worker.moe.activation.ExpertMath`).
    """

    name: str
    target: str
    devices: tuple[str, ...]
    schemes: tuple[Scheme, ...]
    any_math: bool = False

    def load(self) -> "type[MoeBackend]":
        """Imports the backend's class."""
        kind: type[MoeBackend] = resolve_name(self.target)
        return kind


_ROOM, _CPU, _CUDA, _ROCM, _ANY = "ffn_worker.moe", ("cpu",), ("cuda",), ("rocm",), ()
_GPU = _CUDA + _ROCM
_EVERY = (PLAIN, FP8_BLOCK, MXFP4)
_ALL = (
    Backend("torch", f"{_ROOM}.torch_grouped:TorchBackend", _ANY, _EVERY, any_math=True),
    Backend("reference", f"{_ROOM}.reference:ReferenceBackend", _ANY, _EVERY, any_math=True),
    Backend("vllm_cpu", f"{_ROOM}.vllm_cpu:VllmCpuBackend", _CPU, (PLAIN,)),
    Backend("vllm_cuda", f"{_ROOM}.vllm_cuda:VllmCudaBackend", _GPU, (PLAIN, FP8_BLOCK)),
    Backend("aiter", f"{_ROOM}.aiter:AiterBackend", _ROCM, (PLAIN, FP8_BLOCK, MXFP4)),
    Backend("triton", f"{_ROOM}.triton:TritonBackend", _GPU, (PLAIN, FP8_BLOCK, MXFP4)),
    Backend("deep_gemm", f"{_ROOM}.deep_gemm:DeepGemmBackend", _CUDA, (PLAIN, FP8_BLOCK)),
    Backend("grouped", f"{_ROOM}.grouped:GroupedBackend", _CUDA, (PLAIN, FP8_BLOCK)),
    Backend("hopper", f"{_ROOM}.hopper:HopperBackend", _CUDA, (PLAIN, FP8_BLOCK)),
)
BACKENDS = {backend.name: backend for backend in _ALL}

AUTO_ORDER = ("vllm_cpu", "hopper", "vllm_cuda", "triton", "torch")
"""What "auto" tries for plain weights on CPUs and NVIDIA GPUs; for AMD see
:mod:`ffn_worker.moe.instinct`. vLLM's kernels come first, so that both sides of a
deployment round the same way; ``hopper`` uses them unless another backend measured faster."""
AUTO_QUANTISED = ("hopper", "triton", "torch")
"""What "auto" tries for quantised weights there: backends that multiply rows in the wire's format.
``torch`` decodes each expert at each call, so it is taken only if ``ffn.weights`` asks for the
format; otherwise the experts are decoded once, at load."""

CHOICES = (Choice("auto"), *(Choice(backend.name, backend.devices) for backend in _ALL))
"""Values of ``ffn.backend``."""
