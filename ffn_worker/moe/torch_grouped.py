"""Backend in plain PyTorch: groups rows by expert, one matrix product per active expert."""

import torch
import torch.nn.functional as F

from ffn_worker.moe.activation import SILU
from ffn_worker.moe.kept import KeptWeights
from ffn_worker.moe.pairs import LocalPairs, local_pairs, sum_pairs
from ffn_worker.moe.quantise import Weight, dequantise_weight


class TorchBackend(KeptWeights):
    """Runs on every device that PyTorch supports.

    Expert outputs are rounded to the serving dtype, then weighted and summed in float32, as in
    vLLM's fallback (cpu_fused_moe.py, `cpu_fused_moe_torch`). Quantised weights stay quantised;
    each call decodes one active expert at a time.
    """

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        w13, w2 = self._weights[layer]
        math = self._math.get(layer, SILU)
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
            hidden = math.first(F.linear(inputs[group], _plain(w13[expert], x.dtype)), expert)
            product = F.linear(hidden, _plain(w2[expert], x.dtype))
            outputs[group] = math.second(product, expert)
            first += count
        return sum_pairs(pairs, outputs, x)


def _plain(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return weight.codes if weight.scales is None else dequantise_weight(weight).to(dtype)
