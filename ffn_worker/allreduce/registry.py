"""Collectives by name. A new one is one file and one line in BACKENDS."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from afd.errors import ConfigError
from afd.reduce_crossover import measured_crossover, read_crossover, table_of
from ffn_worker.allreduce.base import Alone, Collective, Setup
from ffn_worker.allreduce.formats import FORMATS

logger = logging.getLogger("afd.ffn")

EXACT = "exact"
REDUCE_FORMATS = (EXACT, *FORMATS)
_CPU = torch.device("cpu")


def _gloo(setup: Setup, _: Path | None) -> Collective:
    from ffn_worker.allreduce.gloo import GlooCollective

    if setup.device.type != "cpu":
        raise ConfigError(f"gloo runs on CPUs, not on {setup.device}; use nccl or quick")
    return GlooCollective(setup)


def _nccl(setup: Setup, _: Path | None) -> Collective:
    from ffn_worker.allreduce.nccl import NcclCollective

    return NcclCollective(setup)


def _quick(setup: Setup, table: Path | None) -> Collective:
    _need_gpu("quick", setup)
    from ffn_worker.allreduce.nccl import NcclCollective
    from ffn_worker.allreduce.quick import CannotMap, QuickCollective  # needs triton

    name = setup.fmt.name if setup.fmt else EXACT
    table = table or table_of(torch.cuda.get_device_name(setup.device))
    crossover = read_crossover(table, setup.world, _dtype(setup), name)
    library = NcclCollective(replace(setup, fmt=None))
    try:
        return QuickCollective(setup, crossover, library)
    except CannotMap as err:
        library.close()
        remedy = "set ffn.reduce to exact, whose sums can go through NCCL"
        raise ConfigError(f"{err}; {remedy}") from err


def _exact_on_gpus(setup: Setup, _: Path | None) -> Collective:
    """Through peer memory where that was measured on this kind of GPU, else NCCL or RCCL."""
    from ffn_worker.allreduce.nccl import NcclCollective

    device = torch.cuda.get_device_name(setup.device)
    crossover = measured_crossover(device, setup.world, _dtype(setup), EXACT)
    library = NcclCollective(setup)
    if crossover is None:
        return library
    from ffn_worker.allreduce.quick import CannotMap, QuickCollective  # needs triton

    try:
        return QuickCollective(setup, crossover, library)
    except CannotMap as err:
        logger.warning("%s; sums go through NCCL", err)
        return library


def _aiter_quick(setup: Setup, _: Path | None) -> Collective:
    _need_gpu("aiter_quick", setup)
    from ffn_worker.allreduce.aiter_quick import AiterQuickCollective

    return AiterQuickCollective(setup)


def _dtype(setup: Setup) -> str:
    return str(setup.dtype).removeprefix("torch.")


def _need_gpu(name: str, setup: Setup) -> None:
    if setup.device.type != "cuda":
        raise ConfigError(f"the all-reduce {name} runs on GPUs, not on {setup.device}; use gloo")


BACKENDS: dict[str, Callable[[Setup, Path | None], Collective]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "quick": _quick,
    "aiter_quick": _aiter_quick,
}
"""By the setup and the crossover table that was named, if one was."""


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
        name: a key of BACKENDS; "auto" takes gloo on CPUs, on GPUs quick; but nccl for exact sums
            where quick was not measured on this kind of GPU, or the GPUs cannot map each other's
            memory.
        fmt: one of REDUCE_FORMATS, how partial sums travel.
        rank, world, address, device, dtype, deadline_s, start_s: see :class:`Setup`.
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
    setup = Setup(rank, world, form, address, device, dtype, deadline_s, start_s)
    if name != "auto":
        made = BACKENDS[name](setup, table)
    elif device.type == "cpu":
        made = _gloo(setup, table)
    else:
        made = _quick(setup, table) if form else _exact_on_gpus(setup, table)
    logger.info("sums of %d ranks: %s, through %s", world, fmt, made.name)
    return made
