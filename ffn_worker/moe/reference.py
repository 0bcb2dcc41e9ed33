"""References in float32, one expert after the other, written for readability."""

import torch
import torch.nn.functional as F

from afd.wire.rows_torch import EncodedRows
from ffn_worker.moe.activation import SILU
from ffn_worker.moe.base import Linear
from ffn_worker.moe.kept import KeptWeights
from ffn_worker.moe.quantise import Weight, dequantise_weight
from ffn_worker.moe.sorting import PlacedPairs


class ReferenceBackend(KeptWeights):
    """Rounds once, at the end, to the serving dtype. All other backends are tested against it."""

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        w13, w2 = self._weights[layer]
        math = self._math.get(layer, SILU)
        x32 = x.float()
        total = torch.zeros_like(x32)
        for expert in range(self.start, self.end):
            chosen = topk_ids == expert  # [rows, K]
            rows = chosen.any(dim=1)
            if not rows.any():
                continue
            weight = torch.where(chosen, topk_weights, 0.0).sum(dim=1, keepdim=True)  # [rows, 1]
            first = dequantise_weight(w13[expert - self.start])
            held = expert - self.start
            hidden = math.first(F.linear(x32[rows], first), held)
            y = math.second(F.linear(hidden, dequantise_weight(w2[held])), held)
            total[rows] += weight[rows] * y
        return total.to(x.dtype)

    def linear(self, weight: torch.Tensor) -> Linear:
        weight32 = weight.float()
        return lambda x: F.linear(x.float(), weight32).to(x.dtype)


def gate_up(
    rows: EncodedRows, weight: Weight, placed: PlacedPairs, top_k: int, tile: int
) -> torch.Tensor:
    """silu(gate) * up by slots, float32 [slots, I]; NaN in slots without a pair.

    Rounds gate and up to bfloat16, as DeepGEMM does.

    Args:
        rows: [n, H]. weight: [E, 2*I, H].
        tile: the run of slots of each expert begins at a multiple of it.
    """
    decoded, values = rows.decode(torch.float32), dequantise_weight(weight)
    shape = len(placed.pairs), weight.shape[1] // 2
    activation = torch.full(shape, torch.nan, device=rows.device)
    begin = 0
    for expert, end in enumerate(placed.ends.tolist()):
        h = F.linear(decoded[placed.pairs[begin:end].long() // top_k], values[expert])
        gate, up = h.bfloat16().float().chunk(2, dim=-1)
        activation[begin:end] = F.silu(gate) * up
        begin = -(-end // tile) * tile
    return activation


def down(a: torch.Tensor, weight: Weight, placed: PlacedPairs, tile: int) -> torch.Tensor:
    """a x weight.T by slots, float32 [slots, H]; NaN in slots without a pair.

    Args:
        a: [slots, I]. weight: [E, H, I]. tile: as in :func:`gate_up`.
    """
    values = dequantise_weight(weight)
    out = torch.full((len(a), weight.shape[1]), torch.nan, device=a.device)
    begin = 0
    for expert, end in enumerate(placed.ends.tolist()):
        out[begin:end] = F.linear(a[begin:end].float(), values[expert])
        begin = -(-end // tile) * tile
    return out
