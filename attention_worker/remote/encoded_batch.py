"""The rows of one micro-batch as the wire carries them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from afd.errors import CapacityExceeded
from afd.wire.layout import SlotLayout
from afd.wire.rows_torch import EncodedRows
from attention_worker.remote.dispatch import DispatchPlan


@dataclass(frozen=True)
class EncodedBatch:
    """One encoded micro-batch.

    It stays referenced until its answer is read: it may have to be sent again, and a copy on a GPU
    stream reads its memory later.

    payload, scales: as the wire's tag stores them; scales is None where the tag has none.
    ids: int32 [rows, top_k], expert ids, or expert slots once the batch is dispatched; -1 means
        that no expert computes the pair.
    weights: float32 [rows, top_k].
    plan: which rows go to which FFN instance; None: every FFN instance gets all rows.
    """

    layer: int
    rows: int
    payload: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    plan: DispatchPlan | None = None

    def parts(self, layout: SlotLayout) -> list[tuple[int, int, int]]:
        """(offset in the slot, address, bytes) of each tensor, as afd_comm takes them. The ids come
        last."""
        return [(at, tensor.data_ptr(), tensor.nbytes) for at, tensor in self._tensors(layout)]

    def row_parts(self, layout: SlotLayout) -> list[tuple[int, int, int]]:
        """(offset in the slot, address of the first row, bytes per row) of each tensor.

        Empty if no rank gets a row: an empty tensor has no address.
        """
        if not len(self.ids):
            return []
        return [
            (at, tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
            for at, tensor in self._tensors(layout)
        ]

    def with_slots(self, slots: torch.Tensor) -> EncodedBatch:
        """The same batch with expert slots, int32 [rows, top_k], in place of expert ids."""
        return replace(self, ids=slots)

    def by_rank(self, plan: DispatchPlan) -> EncodedBatch:
        """The rows in the order of ``plan``, rank by rank. A row that several ranks get is
        repeated."""
        rows = plan.in_order()
        scales = None if self.scales is None else self.scales[rows]
        return EncodedBatch(
            self.layer,
            self.rows,
            self.payload[rows],
            scales,
            self.ids[rows],
            self.weights[rows],
            plan,
        )

    def _tensors(self, layout: SlotLayout) -> list[tuple[int, torch.Tensor]]:
        tensors = [(0, self.payload), (layout.weights_offset, self.weights)]
        if self.scales is not None:
            tensors.append((layout.scales_offset, self.scales))
        return [*tensors, (layout.ids_offset, self.ids)]


def encode(
    layout: SlotLayout,
    layer: int,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    encoded: EncodedRows | None = None,
) -> EncodedBatch:
    """Encodes the rows of one micro-batch in the wire format of ``layout``.

    Args:
        hidden: model dtype [rows, hidden].
        ids: int32 [rows, top_k], expert ids or expert slots.
        weights: float32 [rows, top_k].
        encoded: the rows in the format of ``layout``, if an earlier kernel made them.

    Raises:
        CapacityExceeded: more rows than a slot holds.
    """
    rows = hidden.shape[0]
    if rows > layout.capacity:
        raise CapacityExceeded(
            f"a micro-batch of {rows} rows exceeds the slot capacity of {layout.capacity} rows; "
            "raise attention.max_num_batched_tokens (it sets the capacity) on every role"
        )
    if encoded is None:
        encoded = EncodedRows.of(hidden, layout.tag)
    return EncodedBatch(layer, rows, encoded.payload, encoded.scales, ids, weights)
