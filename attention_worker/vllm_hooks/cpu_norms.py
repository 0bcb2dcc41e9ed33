"""RMS norms of attention instances on CPUs, by vLLM's C kernels.

Without torch.compile vLLM computes a norm on CPUs in about ten torch operations: it offers its C
kernels for norms on GPUs only (vllm/kernels/vllm_c.py), although its CPU library has them.
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

from afd.host.processor import is_x86

_LANES = 16
"""The kernels want rows of a multiple of so many elements, or of a divisor of it."""

_Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def use_c_norms(model: nn.Module) -> None:
    """Replaces the forward of the norms in ``model``, whose weights are in.

    Norms in float32 stay: there the tokens of vLLM's own arithmetic are promised. In 16 bits the
    kernels round once, and vLLM's operations twice. Norms in bfloat16 stay on x86 processors
    without AVX512_BF16: there the kernels cut the last bits off (csrc/cpu/cpu_types_x86.hpp).
    """
    current_platform.import_kernels()
    for module in model.modules():
        if type(module) is RMSNorm and _fits(module):
            vars(module)["forward"] = _forward(module)


def has_c_norm(norm: nn.Module) -> bool:
    """Returns whether the forward of ``norm`` is the C kernel."""
    return "forward" in vars(norm)


def kernels_round(dtype: torch.dtype) -> bool:
    """Returns whether the kernels for this processor round to ``dtype``, instead of cutting."""
    return dtype == torch.float16 or not is_x86() or torch.cpu._is_avx512_bf16_supported()


def _fits(norm: RMSNorm) -> bool:
    plain, dtype = norm.has_weight and norm.variance_size_override is None, norm.weight.dtype
    sixteen = dtype.itemsize == 2 and kernels_round(dtype)
    return plain and sixteen and norm.weight.numel() % _LANES == 0


def _forward(norm: RMSNorm) -> Callable[..., _Normed]:
    kernel, fused = torch.ops._C.rms_norm.default, torch.ops._C.fused_add_rms_norm.default
    plain: Callable[..., _Normed] = norm.forward_native
    weight, epsilon = norm.weight.data, norm.variance_epsilon

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> _Normed:
        """Returns the norm of x; with a residual, that of the sum, and the sum, both in place.

        x, residual: [..., hidden]. The kernels read rows that follow one another.
        """
        if x.dtype != weight.dtype:
            return plain(x, residual)
        if residual is None:
            x = x.contiguous()
            out = torch.empty_like(x)
            kernel(out, x, weight, epsilon)
            return out
        if not (x.is_contiguous() and residual.is_contiguous()):
            return plain(x, residual)
        fused(x, residual, weight, epsilon)
        return x, residual

    return forward
