"""How many rows each attention instance sends in a step, for the host and for its graph."""

from collections.abc import Sequence

import numpy as np
import torch

from afd.schedule import row_shares, split_rows
from ffn_worker.pool.order_format import Mix, Part, Parts


class RowTable:
    """The rows of one step, by micro-batch and attention instance.

    The host fills it before a replay. The graph loads it into device memory first, and masks the
    rows that were not sent. All memory is allocated at start-up.

    depths: int32 [attention instances], micro-batches of each; 0: absent.
    answers: int32 [attention instances, micro-batches], the rows that this rank returns.
    firsts: likewise, the first of them.
    """

    def __init__(
        self,
        instances: int,
        max_depth: int,
        most_rows: int,
        device: torch.device,
        *,
        rank: int,
        tp: int,
    ) -> None:
        """most_rows: of one instance in a step. rank, tp: this rank's number in its FFN instance,
        and its ranks."""
        pinned = device.type != "cpu"
        shape = (max_depth, instances)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._rows = self._host.numpy()
        self._totals = np.zeros(instances, np.int32)  # rows of the whole step
        self.depths = np.zeros(instances, np.int32)
        self.answers = np.zeros((instances, max_depth), np.int32)
        self.firsts = np.zeros_like(self.answers)
        # By rows of the step, depth and micro-batch; so a step takes look-ups only.
        self._split = np.zeros((most_rows + 1, max_depth + 1, max_depth), np.int32)
        for depth in range(1, max_depth + 1):
            for rows in range(most_rows + 1):
                self._split[rows, depth, :depth] = split_rows(rows, depth)
        shares = [row_shares(rows, tp)[rank] for rows in range(most_rows + 1)]
        self._share = np.array(shares, np.int32)  # first row and end of this rank's, by rows
        self._alone = tp == 1
        self._filled: tuple[Mix | None, Sequence[object]] = None, ()  # from what

    def fill(self, parts: Sequence[Part], senders: Sequence[object]) -> None:
        """Takes the parts of an announced step. Those without a sender count as absent."""
        given = Parts.of(parts)
        if given.mix is self._filled[0] and senders is self._filled[1]:
            return
        self._filled = given.mix, senders
        fields = given.table
        if None in senders:
            fields = fields[[sender is not None for sender in senders]]
        attention, totals, depths = fields["attention"], self._totals, self.depths
        totals[:] = depths[:] = 0
        totals[attention], depths[attention] = fields["rows"], fields["depth"]
        sent = self._split[totals, depths]
        self._rows[:] = sent.T
        if self._alone:
            self.answers[:] = sent
        else:
            shares = self._share[sent]
            self.firsts[:] = shares[..., 0]
            self.answers[:] = shares[..., 1] - shares[..., 0]

    def rows_of_step(self) -> list[int]:
        """Returns the rows of each micro-batch, over all attention instances."""
        return [int(rows) for rows in self._rows.sum(axis=1)]

    def load(self) -> None:
        """Copies the rows to the device, in stream order."""
        self._device.copy_(self._host, non_blocking=True)

    def of(self, micro_batch: int) -> torch.Tensor:
        """Returns the rows that a step has loaded: int32 [attention instances] on the device."""
        return self._device[micro_batch]
