"""Collectives by name. A new one is one file and one line here."""

import torch

from afd.errors import ConfigError
from ffn_worker.allreduce.base import Alone, Collective
from ffn_worker.allreduce.formats import FORMATS
from ffn_worker.allreduce.gloo import GlooCollective

EXACT = "exact"
REDUCE_FORMATS = (EXACT, *FORMATS)
BACKENDS = {"gloo": GlooCollective}
_CPU = torch.device("cpu")


def make_collective(
    name: str,
    fmt: str,
    rank: int,
    world: int,
    address: str,
    device: torch.device = _CPU,
    *,
    deadline_s: float = 10.0,
    start_s: float = 120.0,
) -> Collective:
    """This process's end of the collectives of one FFN instance. Blocks until all ranks are there.

    Args:
        name: a key of BACKENDS, or "auto" for the device's own.
        fmt: one of REDUCE_FORMATS, how partial sums travel.
        address: where the ranks meet, see :func:`ffn_worker.allreduce.rendezvous.open_store`.
        deadline_s: how long a collective waits for a rank. start_s: the same for the start.

    Raises:
        ConfigError: unknown names, or the backend cannot do this here.
        PeerLost, DeadlineExceeded: the other ranks did not come.
    """
    if fmt not in REDUCE_FORMATS:
        raise ConfigError(
            f"all-reduce format {fmt!r} is not known; use one of {', '.join(REDUCE_FORMATS)}"
        )
    if name != "auto" and name not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"all-reduce backend {name!r} is not known; use one of {known}")
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} does not exist; ranks count from 0")
    if world == 1:
        return Alone()
    backend = BACKENDS["gloo" if name == "auto" else name]
    return backend(rank, world, FORMATS.get(fmt), address, deadline_s=deadline_s, start_s=start_s)
