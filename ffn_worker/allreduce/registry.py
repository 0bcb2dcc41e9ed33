"""Collectives by name. A new one is one file and one line in BACKENDS."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from afd.errors import ConfigError
from afd.reduce_crossover import read_crossover, table_of
from ffn_worker.allreduce.base import Alone, Collective
from ffn_worker.allreduce.formats import FORMATS, ReduceFormat

EXACT = "exact"
REDUCE_FORMATS = (EXACT, *FORMATS)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Request:
    """Arguments of make_collective, checked. form: None for exact."""

    rank: int
    world: int
    form: ReduceFormat | None
    address: str
    device: torch.device
    dtype: torch.dtype
    deadline_s: float
    start_s: float
    table: Path | None


def _gloo(r: _Request) -> Collective:
    from ffn_worker.allreduce.gloo import GlooCollective

    if r.device.type != "cpu":
        raise ConfigError(f"gloo runs on CPUs, not on {r.device}; use nccl or quick")
    times = {"deadline_s": r.deadline_s, "start_s": r.start_s}
    return GlooCollective(r.rank, r.world, r.form, r.address, **times)


def _nccl(r: _Request) -> Collective:
    from ffn_worker.allreduce.nccl import NcclCollective

    times = {"deadline_s": r.deadline_s, "start_s": r.start_s}
    return NcclCollective(r.rank, r.world, r.form, r.address, device=r.device, **times)


def _quick(r: _Request) -> Collective:
    _need_gpu("quick", r)
    from ffn_worker.allreduce.quick import QuickCollective  # needs triton

    name = r.form.name if r.form else EXACT
    table = r.table or table_of(torch.cuda.get_device_name(r.device))
    return QuickCollective(
        r.rank,
        r.world,
        r.form,
        r.address,
        device=r.device,
        deadline_s=r.deadline_s,
        start_s=r.start_s,
        crossover=read_crossover(table, r.world, str(r.dtype).removeprefix("torch."), name),
        dtype=r.dtype,
    )


def _aiter_quick(r: _Request) -> Collective:
    _need_gpu("aiter_quick", r)
    from ffn_worker.allreduce.aiter_quick import AiterQuickCollective

    times = {"deadline_s": r.deadline_s, "start_s": r.start_s}
    return AiterQuickCollective(r.rank, r.world, r.form, r.address, device=r.device, **times)


def _need_gpu(name: str, r: _Request) -> None:
    if r.device.type != "cuda":
        raise ConfigError(f"the all-reduce {name} runs on GPUs, not on {r.device}; use gloo")


BACKENDS: dict[str, Callable[[_Request], Collective]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "quick": _quick,
    "aiter_quick": _aiter_quick,
}


def make_collective(
    name: str,
    fmt: str,
    rank: int,
    world: int,
    address: str,
    device: torch.device = _CPU,
    *,
    dtype: torch.dtype = torch.bfloat16,
    deadline_s: float = 10.0,
    start_s: float = 120.0,
    table: Path | None = None,
) -> Collective:
    """This process's end of the collectives of one FFN instance. Blocks until all ranks are there.

    Args:
        name: a key of BACKENDS; "auto" takes gloo on CPUs, on GPUs nccl where the format is exact
            and quick where it is not.
        fmt: one of REDUCE_FORMATS, how partial sums travel.
        address: where the ranks meet, see :func:`ffn_worker.allreduce.rendezvous.open_store`.
        dtype: of the rows.
        deadline_s: how long a collective waits for a rank. start_s: the same for the start.
        table: quick's crossover table; None: the device's own.

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
    form = FORMATS.get(fmt)
    if name == "auto":
        name = "gloo" if device.type == "cpu" else "quick" if form else "nccl"
    times = (deadline_s, start_s)
    return BACKENDS[name](_Request(rank, world, form, address, device, dtype, *times, table))
