"""Random expert weights, for benchmarks of models without their checkpoint."""

from collections.abc import Iterator

import torch

from afd.models import MoeModel
from ffn_worker.experts.shard import DTYPES, LayerWeights, Shard
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


def dummy_layers(
    model: MoeModel, shard: Shard, device: torch.device = _CPU
) -> Iterator[tuple[int, LayerWeights]]:
    """Yields random weights, as :meth:`ffn_worker.experts.loader.ShardLoader.layers` does.

    Values differ between layers and between processes.
    """
    dtype, hidden = DTYPES[model.dtype], model.hidden
    width = shard.width[1] - shard.width[0]
    held = shard.slots[1] - shard.slots[0]

    def weight(*shape: int) -> Weight:
        return Weight.of(dummy_weight(shape, dtype, device))

    for layer in model.moe_layers:
        routed = weight(held, 2 * width, hidden), weight(held, hidden, width)
        shared: tuple[Weight | None, Weight | None] = None, None
        if shard.shared is not None:
            narrow = shard.shared[1] - shard.shared[0]
            shared = weight(2 * narrow, hidden), weight(hidden, narrow)
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if model.expert_bias:
            biases = (
                dummy_weight((held, 2 * width), dtype, device),
                dummy_weight((held, hidden), dtype, device),
            )
        yield layer, LayerWeights(*routed, *shared, *biases)
