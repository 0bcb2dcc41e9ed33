"""How many rows chose each expert: counted where the experts are, without waiting for a device."""

from collections.abc import Sequence

import torch


class SlotLoad:
    """Rows that each slot of one layer has computed. The step's thread adds; another may read."""

    def __init__(self, experts: Sequence[int], first: int, device: torch.device) -> None:
        """experts: in each of this instance's slots; ``first``: the number of the first of them."""
        self._experts = tuple(experts)
        self._first = first
        # The first entry takes pairs of slots below ours and masked ones, the last those above.
        self._counts = torch.zeros(len(experts) + 2, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def add(self, ids: torch.Tensor) -> None:
        """Count one batch. ids: int32 [rows, top_k], slots of the deployment, negative if masked.

        May be captured in a graph.
        """
        slots = (ids.flatten() - (self._first - 1)).clamp_(0, len(self._experts) + 1)
        self._counts.index_add_(0, slots, self._one.expand(len(slots)))

    @property
    def counts(self) -> torch.Tensor:
        """int64 [slots], for kernels that count as they sort."""
        return self._counts[1:-1]

    def added_to(self, rows: Sequence[int]) -> tuple[int, ...]:
        """``rows`` [experts of the model] and what was counted here."""
        total = list(rows)
        for expert, count in zip(self._experts, self.counts.tolist(), strict=True):
            total[expert] += count
        return tuple(total)
