"""Backend on vLLM's fused Triton experts: the kernels that colocated vLLM runs on the same GPU.

Source, vLLM 0.26: model_executor/layers/fused_moe/fused_moe.py (`fused_experts`) and config.py
(`fp8_w8a8_moe_quant_config`). The FP8 path has not run on a GPU.
"""

import importlib.util
from collections.abc import Callable

import torch

from afd.wire.layout import SCALE_BLOCK
from ffn_worker.moe.base import MoeBackend
from ffn_worker.moe.device import native_fp8
from ffn_worker.moe.pairs import masked_pairs_on_gpu
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.scheme import Scheme


def _fused_experts() -> Callable[..., torch.Tensor]:
    # Imported late, because importing vLLM takes seconds (late_imports.py).
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    call: Callable[..., torch.Tensor] = fused_experts
    return call


def _block_config(w13: Weight, w2: Weight) -> object:
    """Configuration of `fused_experts` for FP8_BLOCK weights; it quantises the rows itself."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    assert w13.scales is not None and w2.scales is not None
    config: object = fp8_w8a8_moe_quant_config(
        w1_scale=w13.scales, w2_scale=w2.scales, block_shape=[SCALE_BLOCK, SCALE_BLOCK]
    )
    return config


class VllmCudaBackend(MoeBackend):
    """Weights in the serving dtype or FP8_BLOCK; rows in the serving dtype.

    If one instance holds all experts, this is exactly what colocated vLLM runs. Its kernels then do
    not support negative ids (csrc/moe/moe_align_sum_kernels.cu indexes by them), so the first
    expert computes masked pairs with weight 0. Otherwise masked pairs and pairs of other instances
    are mapped to -1, which the kernels skip.
    """

    capturable = True

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._holds_all = num_experts is not None and experts == (0, num_experts)
        self._fused_experts = _fused_experts()
        self.fp8 = native_fp8()
        self._weights: dict[int, tuple[Weight, Weight, object]] = {}
        self._map: torch.Tensor | None = None

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        if importlib.util.find_spec("vllm") is None:  # located, not imported
            return "the package vllm is not installed"
        if not torch.cuda.is_available():
            return "torch sees no GPU"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"its kernels take bfloat16 and float16, not {dtype}"
        return None

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        config = _block_config(w13, w2) if w13.scheme is Scheme.FP8_BLOCK else None
        self._weights[layer] = (w13, w2, config)
        if not self._holds_all and self._map is None:
            # One more entry than there are local experts, for all other ids.
            self._map = torch.arange(self.end - self.start + 1, dtype=torch.int32)
            self._map[-1] = -1
            self._map = self._map.to(w13.codes.device)

    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        w13, w2, _ = self._weights[layer]
        return (*w13.tensors, *w2.tensors)

    def release(self, layer: int) -> None:
        del self._weights[layer]

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        if x.shape[0] == 0:
            return torch.empty_like(x)
        w13, w2, config = self._weights[layer]
        count = self.end - self.start
        other, experts = (0, count) if self._holds_all else (count, count + 1)
        ids, weights = masked_pairs_on_gpu(topk_ids, topk_weights, self.start, self.end, other)
        return self._fused_experts(
            x,
            w13.codes,
            w2.codes,
            weights,
            ids,
            global_num_experts=experts,
            expert_map=self._map,
            quant_config=config,
        )
