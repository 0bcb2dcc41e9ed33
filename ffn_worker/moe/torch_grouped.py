"""Backend in plain PyTorch: rows grouped by expert, one matrix product per active expert."""

import torch
import torch.nn.functional as F

from ffn_worker.moe.base import MoeBackend
from ffn_worker.moe.pairs import LocalPairs, local_pairs, sum_pairs


class TorchBackend(MoeBackend):
    """Runs wherever PyTorch runs. Expert outputs are rounded to the serving dtype, then weighted
    and summed in float32, as vLLM's own fallback does (cpu_fused_moe.py, `cpu_fused_moe_torch`).
    """

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, layer: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self._weights[layer] = (w13, w2)

    def release(self, layer: int) -> None:
        del self._weights[layer]

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        w13, w2 = self._weights[layer]
        pairs = local_pairs(topk_ids, topk_weights, self.start, self.end)
        order = torch.argsort(pairs.experts, stable=True)
        pairs = LocalPairs(*(column[order] for column in pairs))
        inputs = x[pairs.rows]
        outputs = torch.empty_like(inputs)
        counts = torch.bincount(pairs.experts, minlength=self.end - self.start).tolist()
        first = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            group = slice(first, first + count)
            gate, up = F.linear(inputs[group], w13[expert]).chunk(2, dim=-1)
            outputs[group] = F.linear(F.silu(gate) * up, w2[expert])
            first += count
        return sum_pairs(pairs, outputs, x)
