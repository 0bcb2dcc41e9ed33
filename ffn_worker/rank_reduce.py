"""A reduce-scatter over the ranks of an FFN instance: adds up their results; each gets a share."""

from collections.abc import Sequence

import torch

from afd.schedule import row_shares
from ffn_worker.allreduce.base import Collective


class RankReduce:
    """The reduce-scatter of expert outputs over the ranks of an instance.

    Every rank computes its slice of the experts for all rows, and returns a share of the summed
    rows, so the instance sends as many bytes as one rank would. The rows of each attention instance
    are split separately by :func:`afd.schedule.row_shares`, which the attention instance uses too,
    so it knows which rank returns which rows.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold :meth:`reduce_scatter`."""
        return self._collective.capturable

    @property
    def in_order(self) -> bool:
        """Whether all ranks must run the micro-batches in the same order, because they add up each
        of them."""
        return self._collective.world > 1

    def reduce_scatter(
        self, out: torch.Tensor, rows: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns this rank's share of the sum, concatenated by attention instance.

        Args:
            out: this rank's results, [sum of rows, hidden]. rows: of each attention instance.

        Returns:
            The rows, and how many of them belong to each attention instance. Rows after those are
            padding.
        """
        rank, world = self._collective.rank, self._collective.world
        if world == 1:
            return out, rows
        if len(rows) > 1:
            out = sort_by_rank(out, rows, world)
        sums = self._collective.reduce_scatter(out)
        shares = [row_shares(n, world)[rank] for n in rows]
        return sums, [end - start for start, end in shares]

    def check(self) -> None:
        """Raises PeerLost or DeadlineExceeded if a rank did not take part in a step on streams."""
        self._collective.check()


def sort_by_rank(out: torch.Tensor, rows: Sequence[int], world: int) -> torch.Tensor:
    """Sorts rows by the rank that returns them: rank 0's share of each attention instance, padded
    with zeros to the size of the largest share, then rank 1's, and so on.

    [sum of rows, hidden] -> [world * largest share, hidden]. Does not wait for the device and puts
    no index on it.
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
