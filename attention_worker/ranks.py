"""The ranks of an attention instance (``attention.tp``): who they are, and what they exchange.

All ranks run the same steps, and after each attention half all of them hold all rows. Each sends a
share of the rows to the FFN instances, and gathers the answers of all ranks. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from afd.schedule import row_shares, share_rows
from attention_worker.draft_layer import DraftExperts


def cores_of_rank(cores: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """Returns the cores of one rank, of those of its instance. With too few, ranks share them."""
    if len(cores) < ranks:
        return tuple(cores[rank % len(cores) :][:1]) if cores else ()
    first, end = row_shares(len(cores), ranks)[rank]
    return tuple(cores[first:end])


def _as_given(value: int) -> int:
    return value


def _not_gathered(rows: torch.Tensor) -> torch.Tensor:
    return rows


@dataclass(frozen=True)
class Ranks:
    """The ranks of this instance, as one of them sees them. The default: there is only this one.

    rank: own number, from 0. count: of all.
    gather: [rows, hidden] of each rank -> [count * rows, hidden] on every rank, in rank order.
    agree: returns the value of rank 0 on every rank; each rank calls it in the same steps.
    """

    rank: int = 0
    count: int = 1
    gather: Callable[[torch.Tensor], torch.Tensor] = _not_gathered
    agree: Callable[[int], int] = _as_given

    def experts(self, remote: DraftExperts) -> DraftExperts:
        """Returns the remote experts as a model of this rank calls them."""
        return remote if self.count == 1 else RowShares(self, remote)


class RowShares:
    """Remote experts of one rank of several; see :class:`attention_worker.pipeline.Experts`.

    The shares are those of :func:`afd.schedule.share_rows`. A rank whose share is empty sends one
    row that no routed expert computes, so that every rank takes part in every expert call.
    """

    def __init__(self, ranks: Ranks, remote: DraftExperts) -> None:
        self._ranks = ranks
        self._remote = remote
        self._rows: dict[int, int] = {}  # by micro-batch, of all ranks

    def begin_step(self, depth: int, *, draft: bool = False) -> None:
        self._remote.begin_step(depth, draft=draft)

    def sending(self, layer: int, micro_batch: int, rows: int) -> AbstractContextManager[object]:
        return self._remote.sending(layer, micro_batch, share_rows(rows, self._ranks.count))

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        rows = self._rows[micro_batch] = len(hidden)
        each = share_rows(rows, self._ranks.count)
        first = self._ranks.rank * each
        if first >= rows:
            hidden, ids, weights = hidden[:1], torch.full_like(ids[:1], -1), weights[:1]
        else:
            share = slice(first, min(first + each, rows))
            hidden, ids, weights = hidden[share], ids[share], weights[share]
        self._remote.send(layer, micro_batch, hidden, ids, weights)

    def recv(self, micro_batch: int) -> torch.Tensor:
        rows, own = self._rows[micro_batch], self._remote.recv(micro_batch)
        each = share_rows(rows, self._ranks.count)
        if len(own) < each:
            own = torch.cat([own, own.new_zeros(each - len(own), own.shape[1])])
        return self._ranks.gather(own)[:rows]

    def end_step(self) -> None:
        self._remote.end_step()
