"""Expert outputs as the wire carries them back: cut by attention instance, encoded once."""

from dataclasses import dataclass

import torch

from afd.wire.codecs_torch import encode
from afd.wire.layout import SlotLayout


@dataclass(frozen=True)
class Answers:
    """Rows of all peers, one below the other: payload and scales (None: the tag has none)."""

    layout: SlotLayout
    payload: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def of(cls, out: torch.Tensor, layout: SlotLayout) -> "Answers":
        """out: expert outputs [rows, hidden] in the serving dtype."""
        return cls(layout, *encode(out, layout.tag))

    def parts(self, first: int, rows: int) -> list[tuple[int, int, int]]:
        """(offset in the slot, address, bytes) of ``rows`` rows from row ``first`` on."""
        if not rows:
            return []
        payload = self.payload[first : first + rows]
        parts = [(0, payload.data_ptr(), payload.nbytes)]
        if self.scales is not None:
            scales = self.scales[first : first + rows]
            parts.append((self.layout.scales_offset, scales.data_ptr(), scales.nbytes))
        return parts
