"""From the ranks' partial results to what each rank answers: its share of everyone's rows."""

from collections.abc import Sequence

import torch

from afd.schedule import row_shares
from ffn_worker.allreduce.base import Collective


class Shares:
    """Adds up expert outputs over the ranks of an instance.

    Every rank has computed all rows, and answers a share of them: what the instance sends back is
    as many bytes as with one rank. Each attention instance's rows are shared out on their own
    (afd/schedule.py: row_shares), so that it knows which rank answers which without being told.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    @property
    def capturable(self) -> bool:
        return self._collective.capturable

    @property
    def in_order(self) -> bool:
        """Whether all ranks have to take the micro-batches in the same order: their sums are."""
        return self._collective.world > 1

    def of(self, out: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """This rank's rows of the sum, attention instance by attention instance.

        Args:
            out: what this rank computed, [sum of rows, hidden]. rows: of each attention instance.

        Returns:
            The rows, and how many of them are of each attention instance; rows behind those mean
            nothing.
        """
        rank, world = self._collective.rank, self._collective.world
        if world == 1:
            return out, list(rows)
        if len(rows) > 1:
            out = by_rank(out, rows, world)
        sums = self._collective.reduce_scatter(out)
        shares = [row_shares(n, world)[rank] for n in rows]
        return sums, [end - start for start, end in shares]

    def check(self) -> None:
        """Raises PeerLost or DeadlineExceeded if a rank did not take part in a step on streams."""
        self._collective.check()


def by_rank(out: torch.Tensor, rows: Sequence[int], world: int) -> torch.Tensor:
    """Rows sorted by the rank that answers them: first what rank 0 answers of each attention
    instance in turn, padded with zeros to the size of the largest share, then rank 1, ...

    [sum of rows, hidden] -> [world * largest share, hidden]. No host wait, no index on the device.
    """
    each = rows[0] // world
    if all(n == each * world for n in rows):  # one copy instead of one per rank and instance
        parts = out.view(len(rows), world, each, out.shape[1])
        return parts.transpose(0, 1).reshape(out.shape)
    shares = [row_shares(n, world) for n in rows]
    largest = max(sum(s[rank][1] - s[rank][0] for s in shares) for rank in range(world))
    sorted_rows = out.new_zeros((world * largest, out.shape[1]))
    for rank in range(world):
        there, first = rank * largest, 0
        for n, share in zip(rows, shares, strict=True):
            start, end = share[rank]
            sorted_rows[there : there + end - start] = out[first + start : first + end]
            there, first = there + end - start, first + n
    return sorted_rows
