"""The contract of a collective: sums and gathers among the ranks of one FFN instance."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from afd.schedule import row_shares
from ffn_worker.allreduce.formats import ReduceFormat

__all__ = ["Alone", "Collective", "Setup", "row_shares"]


@dataclass(frozen=True)
class Setup:
    """What every collective is made of.

    Args:
        fmt: format in which partial sums travel; None: exact.
        address: where the ranks meet, see :func:`ffn_worker.allreduce.rendezvous.open_store`.
        device: this rank's. dtype: of the rows.
        deadline_s: how long a collective waits for a rank. start_s: the same for the start.
    """

    rank: int
    world: int
    fmt: ReduceFormat | None
    address: str
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    deadline_s: float = 10.0
    start_s: float = 120.0


class Collective(ABC):
    """Collectives of ``world`` processes, one object in each; all call the same, in the same order.

    Shapes: [rows, hidden], contiguous, in the serving dtype, on the device that the collective was
    made for; rows may be 0 and are the same on every rank. A sum is the same to the bit on every
    rank. Collectives of one object are enqueued on one stream at a time.

    Raises, from any method, never later than its deadline:
        PeerLost: a rank's process ended, or its connection broke.
        DeadlineExceeded: a rank did not take part in time.
    Where a collective is only enqueued (GPU), both come from ``check`` or from a later call. After
    either, the object is of no further use: close it.
    """

    name: ClassVar[str]
    """In the registry and in logs."""
    capturable = False
    """Whether calls may be captured in a CUDA graph and replayed."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may reuse x. [rows, hidden] -> [rows, hidden]."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows, ``row_shares(rows, world)[rank]``, of the sum. x is left as it is.

        A lossy format rounds once here: the second rounding of ``all_reduce``, on the way to
        everyone, does not take place.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """All rows from each rank's share of them, bit for bit in every format.

        x: [share of this rank, hidden] of any dtype; returns [rows, hidden].
        """

    def check(self) -> None:
        """Raises what an enqueued or replayed collective could not. Costs no synchronisation, so
        it says what is known by now: everything, once the stream was waited for."""
        return

    @abstractmethod
    def close(self) -> None:
        """Releases connections and buffers; safe to call twice, and after an error."""


class Alone(Collective):
    """The collective of a single rank: nothing happens, exactly."""

    name = "alone"
    capturable = True

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return x

    def close(self) -> None:
        pass
