"""Reference backend: float32, one expert after the other, written to be read."""

import torch
import torch.nn.functional as F

from ffn_worker.moe.base import Linear, MoeBackend
from ffn_worker.moe.quantise import Scheme, Weight, dequantise_weight


class ReferenceBackend(MoeBackend):
    """Rounds to the serving dtype once, at the end; every other backend is tested against it."""

    schemes = tuple(Scheme)

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._weights: dict[int, tuple[Weight, Weight]] = {}

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        self._weights[layer] = (w13, w2)

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        w13, w2 = self._weights[layer]
        x32 = x.float()
        total = torch.zeros_like(x32)
        for expert in range(self.start, self.end):
            chosen = topk_ids == expert  # [rows, K]
            rows = chosen.any(dim=1)
            if not rows.any():
                continue
            weight = torch.where(chosen, topk_weights, 0.0).sum(dim=1, keepdim=True)  # [rows, 1]
            first = dequantise_weight(w13[expert - self.start])
            gate, up = F.linear(x32[rows], first).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, dequantise_weight(w2[expert - self.start]))
            total[rows] += weight[rows] * y
        return total.to(x.dtype)

    def linear(self, weight: torch.Tensor) -> Linear:
        weight32 = weight.float()
        return lambda x: F.linear(x.float(), weight32).to(x.dtype)
