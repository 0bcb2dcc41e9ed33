"""Random expert weights, for benchmarks of models without their checkpoint."""

import torch

from afd.models import MoeModel
from ffn_worker.experts.loader import DTYPES, LayerWeights, Shard
from ffn_worker.moe.quantise import Weight

_CPU = torch.device("cpu")


def dummy_weight(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU
) -> torch.Tensor:
    """Returns normal values / sqrt(K), [..., N, K], so that products keep the input's scale."""
    weight = torch.empty(shape, dtype=dtype, device=device)
    return weight.normal_().mul_(shape[-1] ** -0.5)


def whole_shard(model: MoeModel, held: int) -> Shard:
    """Returns the shard of one process if ``model`` already has that process's widths: the first
    ``held`` experts of each layer in full width, and the whole shared expert."""
    return Shard(
        slots=(0, held),
        total_slots=model.num_experts,
        experts=dict.fromkeys(model.moe_layers, tuple(range(held))),
        width=(0, model.moe_intermediate),
        shared=(0, model.shared_intermediate) if model.shared_intermediate else None,
    )


def dummy_shard(
    model: MoeModel, shard: Shard, device: torch.device = _CPU
) -> dict[int, LayerWeights]:
    """Returns random weights by layer, as :func:`ffn_worker.experts.loader.load_shard` does.

    Values differ between layers and between processes; all layers are in memory at once.
    """
    dtype, hidden = DTYPES[model.dtype], model.hidden
    width = shard.width[1] - shard.width[0]
    held = shard.slots[1] - shard.slots[0]

    def weight(*shape: int) -> Weight:
        return Weight.of(dummy_weight(shape, dtype, device))

    layers = {}
    for layer in model.moe_layers:
        routed = weight(held, 2 * width, hidden), weight(held, hidden, width)
        shared: tuple[Weight | None, Weight | None] = None, None
        if shard.shared is not None:
            narrow = shard.shared[1] - shard.shared[0]
            shared = weight(2 * narrow, hidden), weight(hidden, narrow)
        layers[layer] = LayerWeights(*routed, *shared)
    return layers
