"""Counts the rows of each expert, on the experts' device and without synchronizing."""

from collections.abc import Sequence
from copy import copy

import torch

from afd.placement.tables import EMPTY


class SlotLoad:
    """Rows that each expert slot of one layer has computed.

    One thread adds; another may read.
    """

    def __init__(self, experts: Sequence[int], first: int, device: torch.device) -> None:
        """experts: the expert in each slot of this instance, or EMPTY. first: number of the first
        slot."""
        self._experts = tuple(experts)
        self._first = first
        # The first entry counts masked pairs and slots before ours, the last those after ours.
        self._counts = torch.zeros(len(experts) + 2, dtype=torch.int64, device=device)
        self._before = [0] * len(experts)
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def add(self, ids: torch.Tensor) -> None:
        """Adds one batch. ids: int32 [rows, top_k], slots of the deployment, negative if masked.

        May be captured in a graph.
        """
        slots = (ids.flatten() - (self._first - 1)).clamp_(0, len(self._experts) + 1)
        self._counts.index_add_(0, slots, self._one.expand(len(slots)))

    def continued(self, experts: Sequence[int]) -> "SlotLoad":
        """Returns the counts of other experts in the same slots, from now on and in the same
        memory, so that a captured graph adds to them. Waits for the device."""
        load = copy(self)
        load._experts = tuple(experts)
        load._before = self.counts.tolist()
        return load

    @property
    def counts(self) -> torch.Tensor:
        """int64 [slots], on the device; sorting kernels add to it."""
        return self._counts[1:-1]

    def added_to(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Returns ``rows`` [experts of the model] plus the counts. Waits for the device."""
        total = list(rows)
        for expert, count, before in zip(
            self._experts, self.counts.tolist(), self._before, strict=True
        ):
            if expert != EMPTY:
                total[expert] += count - before
        return tuple(total)
