"""A backend's store of weights that it keeps as they were given."""

import torch

from ffn_worker.moe.activation import SILU, ExpertMath
from ffn_worker.moe.base import MoeBackend
from ffn_worker.moe.quantise import Weight


class KeptWeights(MoeBackend):
    """Subclasses compute with ``self._weights`` and ``self._math``, by layer."""

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._weights: dict[int, tuple[Weight, Weight]] = {}
        self._math: dict[int, ExpertMath] = {}

    def prepare_math(self, layer: int, math: ExpertMath) -> None:
        self._math[layer] = math

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        self._weights[layer] = (w13, w2)

    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        w13, w2 = self._weights[layer]
        return (*w13.tensors, *w2.tensors, *self._math.get(layer, SILU).tensors)

    def release(self, layer: int) -> None:
        del self._weights[layer]
        self._math.pop(layer, None)
