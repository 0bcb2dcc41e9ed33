"""How many rows each attention instance sends in a step, for the host and for its graph."""

from collections.abc import Sequence

import numpy as np
import torch

from ffn_worker.pool.order_format import Part, Parts


class RowTable:
    """The rows of one step, by micro-batch and attention instance.

    The host fills it before a replay. The graph loads it into device memory first, and masks the
    rows that were not sent. All memory is allocated at start-up.

    depths: int32 [attention instances], micro-batches of each; 0: absent.
    answers: int32 [attention instances, micro-batches], the rows that this rank returns.
    firsts: likewise, the first of them.
    """

    def __init__(
        self, instances: int, max_depth: int, device: torch.device, *, rank: int, tp: int
    ) -> None:
        """rank, tp: this rank's number in its FFN instance, and its ranks."""
        self._rank, self._tp = rank, tp
        pinned = device.type != "cpu"
        shape = (max_depth, instances)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._rows = self._host.numpy()
        self._micro_batches = np.arange(max_depth).reshape(-1, 1)
        self.depths = np.zeros(instances, np.int32)
        self.answers = np.zeros((instances, max_depth), np.int32)
        self.firsts = np.zeros_like(self.answers)

    def fill(self, parts: Sequence[Part], present: Sequence[bool]) -> None:
        """Takes the parts of an announced step. Those that are not present count as absent."""
        fields = Parts.of(parts).table
        if not all(present):
            fields = fields[np.asarray(present, bool)]
        attention, rows, depth = (
            fields[name].astype(np.int64) for name in ("attention", "rows", "depth")
        )
        self.depths[:] = 0
        self.depths[attention] = depth
        # afd.schedule.split_rows: the last micro-batch has the remainder.
        each = rows // depth
        sent = (self._micro_batches < depth) * each
        sent[depth - 1, np.arange(len(depth))] = rows - each * (depth - 1)
        self._rows[:] = 0
        self._rows[:, attention] = sent
        # afd.schedule.row_shares: the first ranks have one row more.
        if self._tp == 1:
            self.answers[:] = self._rows.T
        else:
            each, longer = self._rows // self._tp, self._rows % self._tp
            self.answers[:] = (each + (self._rank < longer)).T
            self.firsts[:] = (self._rank * each + np.minimum(self._rank, longer)).T

    def rows_of_step(self) -> list[int]:
        """Returns the rows of each micro-batch, over all attention instances."""
        return [int(rows) for rows in self._rows.sum(axis=1)]

    def load(self) -> None:
        """Copies the rows to the device, in stream order."""
        self._device.copy_(self._host, non_blocking=True)

    def of(self, micro_batch: int) -> torch.Tensor:
        """Returns the rows that a step has loaded: int32 [attention instances] on the device."""
        return self._device[micro_batch]
