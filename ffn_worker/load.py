"""How many rows chose each expert: counted where the experts are, without waiting for a device."""

from collections.abc import Mapping, Sequence

import torch


class ExpertLoad:
    """Rows per layer and expert that this instance has computed since it started.

    The step's thread adds; another one may read.

    Args:
        layers: global numbers of the MoE layers. num_experts: routed experts of the model.
        device: where the ids are.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, device: torch.device) -> None:
        self._layers = tuple(layers)
        self._device = device
        # One row per layer; its last entry takes the pairs of other instances.
        self._counts = torch.zeros((len(layers), num_experts + 1), dtype=torch.int64, device=device)
        self._row = {layer: number for number, layer in enumerate(layers)}
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def names(self, experts: Sequence[int]) -> torch.Tensor:
        """Table for :meth:`add`: the expert of each slot, and nobody's for one slot more."""
        nobody = self._counts.shape[1] - 1
        return torch.tensor([*experts, nobody], dtype=torch.int64, device=self._device)

    def add(self, layer: int, ids: torch.Tensor, first: int, experts: torch.Tensor) -> None:
        """Count one batch.

        Args:
            ids: int32 [rows, top_k], slots of the whole deployment, negative where masked.
            first: this instance's first slot. experts: see :meth:`names`.
        """
        slots = len(experts) - 1
        local = ids.flatten() - first
        local = torch.where((local >= 0) & (local < slots), local, slots)
        self._counts[self._row[layer]].index_add_(0, experts[local], self._one.expand(len(local)))

    def rows(self) -> Mapping[int, Sequence[int]]:
        """By layer number, the rows of every expert so far."""
        counts = self._counts[:, :-1].tolist()
        return dict(zip(self._layers, counts, strict=True))
