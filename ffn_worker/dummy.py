"""Random expert weights, for benchmarks of models whose checkpoint is not at hand."""

import torch

from afd.models import MoeModel
from ffn_worker.loader import DTYPES, LayerWeights, Shard
from ffn_worker.moe.quantise import Weight

_CPU = torch.device("cpu")


def dummy_weight(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU
) -> torch.Tensor:
    """Normal values / sqrt(K) of [..., N, K], so that products keep the size of their input."""
    weight = torch.empty(shape, dtype=dtype, device=device)
    return weight.normal_().mul_(shape[-1] ** -0.5)


def whole_shard(model: MoeModel, held: int) -> Shard:
    """The first ``held`` experts of each layer in full width, and the whole shared expert: what one
    process holds, where ``model`` has the widths of that process."""
    return Shard(
        slots=(0, held),
        all_slots=model.num_experts,
        experts=dict.fromkeys(model.moe_layers, tuple(range(held))),
        width=(0, model.moe_intermediate),
        shared=(0, model.shared_intermediate) if model.shared_intermediate else None,
    )


def dummy_shard(
    model: MoeModel, shard: Shard, device: torch.device = _CPU
) -> dict[int, LayerWeights]:
    """What :func:`ffn_worker.loader.load_shard` would load, by layer, with random values.

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
        shared = None, None
        if shard.shared is not None:
            narrow = shard.shared[1] - shard.shared[0]
            shared = weight(2 * narrow, hidden), weight(hidden, narrow)
        layers[layer] = LayerWeights(*routed, *shared)
    return layers
