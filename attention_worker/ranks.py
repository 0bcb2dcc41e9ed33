"""The ranks of an attention instance (``attention.tp``): who they are, and what they exchange.

All ranks run the same steps, and after each attention half all of them hold all rows. Each sends a
share of the rows to the FFN instances, and gathers the answers of all ranks. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from afd.schedule import row_shares
from afd.wire.rows_torch import EncodedRows
from attention_worker.draft_layer import DraftExperts


def rows_per_rank(rows: int, ranks: int) -> int:
    """Returns the rows that each rank sends; the last ranks send fewer, or none. So the gathered
    answers, padded to this size, hold the rows in order."""
    return row_shares(rows, ranks)[0][1]


def cores_of_rank(cores: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """Returns the cores of one rank, of those of its instance. With too few, ranks share them."""
    if len(cores) < ranks:
        return tuple(cores[rank % len(cores) :][:1]) if cores else ()
    first, end = row_shares(len(cores), ranks)[rank]
    return tuple(cores[first:end])


def own_gpu_first(
    variables: Sequence[str], environment: Mapping[str, str], rank: int
) -> dict[str, str]:
    """Returns the variables of a device kind that show a rank its own GPU as device 0, as every
    process of a deployment sees it.

    environment: names the GPUs of the instance first, in rank order.
    """
    found = {}
    for name in variables:
        if name in environment:
            gpus = environment[name].split(",")
            found[name] = ",".join([gpus[rank], *gpus[:rank], *gpus[rank + 1 :]])
    return found


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

    A rank whose share is empty sends one row that no routed expert computes, so that every rank
    takes part in every expert call.
    """

    def __init__(self, ranks: Ranks, remote: DraftExperts) -> None:
        self._ranks = ranks
        self._remote = remote
        self._rows: dict[int, int] = {}  # by micro-batch, of all ranks

    def begin_step(self, depth: int, *, draft: bool = False) -> None:
        self._remote.begin_step(depth, draft=draft)

    def sending(self, layer: int, micro_batch: int, rows: int) -> AbstractContextManager[object]:
        return self._remote.sending(layer, micro_batch, rows_per_rank(rows, self._ranks.count))

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        encoded: EncodedRows | None = None,
    ) -> None:
        assert encoded is None, "a rank sends a share of the rows, which it encodes itself"
        rows = self._rows[micro_batch] = len(hidden)
        each = rows_per_rank(rows, self._ranks.count)
        first = self._ranks.rank * each
        if first >= rows:
            hidden, ids, weights = hidden[:1], torch.full_like(ids[:1], -1), weights[:1]
        else:
            share = slice(first, min(first + each, rows))
            hidden, ids, weights = hidden[share], ids[share], weights[share]
        self._remote.send(layer, micro_batch, hidden, ids, weights)

    def recv(self, micro_batch: int) -> torch.Tensor:
        rows, own = self._rows[micro_batch], self._remote.recv(micro_batch)
        each = rows_per_rank(rows, self._ranks.count)
        if len(own) < each:
            own = torch.cat([own, own.new_zeros(each - len(own), own.shape[1])])
        return self._ranks.gather(own)[:rows]

    def end_step(self) -> None:
        self._remote.end_step()
