"""The interface of a collective: sums and gathers among the ranks of one FFN instance."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from afd.schedule import row_shares
from ffn_worker.allreduce.formats_table import EXACT, ReduceFormat

__all__ = ["Alone", "Collective", "Setup", "row_shares"]


@dataclass(frozen=True)
class Setup:
    """What every collective needs to start.

    Args:
        fmt: format in which partial sums are sent; None: exact.
        address: where the ranks meet, see :func:`ffn_worker.allreduce.rendezvous.open_store`.
        device: this rank's device. dtype: dtype of the rows.
        deadline_s: how long a collective waits for a rank, in seconds. start_s: how long the start
            waits for the other ranks, in seconds.
    """

    rank: int
    world: int
    fmt: ReduceFormat | None
    address: str
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    deadline_s: float = 10.0
    start_s: float = 120.0

    @property
    def fmt_name(self) -> str:
        """The format's name, or "exact"."""
        return self.fmt.name if self.fmt else EXACT

    @property
    def dtype_name(self) -> str:
        """The dtype's name without "torch.", such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


class Collective(ABC):
    """Collectives of ``world`` processes, one object in each process.

    All ranks must call the same methods in the same order.

    Shapes: [rows, hidden], contiguous, in the serving dtype, on the device of the setup. ``rows``
    may be 0 and is the same on every rank. Every rank gets the same bits of a sum. Use one stream
    at a time per object.

    Raises, from any method and within its deadline:
        PeerLost: a rank's process ended, or its connection broke.
        DeadlineExceeded: a rank did not take part in time.
    On GPUs a call only enqueues the collective; ``check`` or a later call then raises. After either
    error the object is unusable: close it.
    """

    name: ClassVar[str]
    """Name in the registry and in logs."""
    capturable = False
    """Whether calls may be captured in a CUDA graph and replayed."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks, [rows, hidden]. May overwrite x and return it."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of the sum: ``row_shares(rows, world)[rank]``. Keeps x.

        A lossy format rounds once. ``all_reduce`` rounds twice: it also encodes the sum to send it
        to every rank.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns all rows, [rows, hidden], exactly, whatever the format.

        x: this rank's share of the rows, [share, hidden], of any dtype.
        """

    def check(self) -> None:
        """Raises the error of an enqueued or replayed collective.

        Does not synchronize, so it reports only what is known by now. After the stream has been
        synchronized, it reports every error.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Releases connections and buffers. Safe to call twice and after an error."""


class Alone(Collective):
    """The collective of a single rank: returns its input."""

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
