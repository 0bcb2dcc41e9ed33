"""Routed dispatch: which rows of a micro-batch go to which FFN instance."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DispatchPlan:
    """The rows of one micro-batch by FFN instance.

    rows: int64, the row numbers of instance 0, then those of instance 1, and so on; ascending
        within an instance.
    counts: number of rows per instance.
    tp: ranks per instance. Every rank gets all rows of its instance.
    """

    rows: torch.Tensor
    counts: tuple[int, ...]
    tp: int

    def of_instances(self) -> tuple[torch.Tensor, ...]:
        """Row numbers per FFN instance, int64 each."""
        parts: tuple[torch.Tensor, ...] = self.rows.split(self.counts)
        return parts

    def of_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Number of rows of each of these ranks, instance by instance. Others have no rows."""
        return [self.counts[j // self.tp] for j in ranks]

    def in_order(self) -> torch.Tensor:
        """Row numbers in the order of the ranks, int64 [sum of :meth:`of_ranks` of all]."""
        if self.tp == 1:
            return self.rows
        return torch.cat([part for part in self.of_instances() for _ in range(self.tp)])


class Splitter:
    """Finds the rows that each FFN instance has to compute.

    :func:`afd.placement.dispatch.rows_of_instances` is the reference implementation.
    """

    def __init__(self, bounds: Sequence[int], tp: int, device: torch.device) -> None:
        """bounds: instance j holds the slots [bounds[j], bounds[j + 1]) of each bank. tp: ranks per
        instance."""
        self._tp = tp
        self._instances = len(bounds) - 1
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        one_bank = torch.arange(self._instances).repeat_interleave(torch.tensor(sizes))
        # Index -1 (a masked pair) reads the last entry: an instance that does not exist.
        no_instance = torch.tensor([self._instances])
        self._instance_of = torch.cat([one_bank, one_bank, no_instance]).to(device)

    def split(self, slots: torch.Tensor) -> DispatchPlan:
        """Returns the plan for expert slots int32 [rows, top_k]. Waits for the device."""
        shape = (len(slots), self._instances + 1)
        gets = torch.zeros(shape, dtype=torch.bool, device=slots.device)
        gets = gets.scatter_(1, self._instance_of[slots], True)[:, :-1]
        _, rows = gets.t().nonzero(as_tuple=True)
        return DispatchPlan(rows, tuple(gets.sum(dim=0).tolist()), self._tp)
