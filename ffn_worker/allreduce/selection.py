"""Selects the all-reduce backend of an FFN instance and connects its ranks."""

import logging
from pathlib import Path

import torch

from afd.errors import ConfigError
from ffn_worker.allreduce.base import Alone, Collective, Setup
from ffn_worker.allreduce.crossover import measured_crossover
from ffn_worker.allreduce.formats_table import EXACT, FORMATS, REDUCE_FORMATS
from ffn_worker.allreduce.registry import BACKENDS

logger = logging.getLogger("afd.ffn")

_CPU = torch.device("cpu")


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
    """Connects this process to the other ranks of its FFN instance. Blocks until all are there.

    Args:
        name: a key of BACKENDS, or "auto": gloo on CPUs, quickreduce on GPUs. For exact sums on
            GPUs, "auto" uses nccl if this kind of GPU has no measured crossover table, or if the
            GPUs cannot map each other's memory.
        fmt: one of REDUCE_FORMATS: how partial sums are sent.
        rank, world, address, device, dtype, deadline_s, start_s: see :class:`Setup`.
        table: quickreduce's crossover table; None: the device's own.

    Raises:
        ConfigError: a name is unknown, or the backend cannot run here or in this format.
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
    setup = Setup(rank, world, FORMATS.get(fmt), address, device, dtype, deadline_s, start_s)
    if name != "auto":
        made = BACKENDS[name].make(setup, table)
    elif device.type == "cpu":
        made = BACKENDS["gloo"].make(setup)
    elif setup.fmt is None:
        made = _exact_on_gpus(setup)
    else:
        made = BACKENDS["quickreduce"].make(setup, table)
    logger.info("all-reduce: %d ranks, %s, backend %s", world, fmt, made.name)
    return made


def _exact_on_gpus(setup: Setup) -> Collective:
    """quickreduce if it was measured on this kind of GPU and can run, else nccl."""
    from ffn_worker.allreduce.nccl import NcclCollective

    device = torch.cuda.get_device_name(setup.device)
    crossover = measured_crossover(device, setup.world, setup.dtype_name, EXACT)
    library = NcclCollective(setup)
    if crossover is None:
        return library
    from ffn_worker.allreduce.quickreduce import CannotMap, QuickReduceCollective  # needs triton

    try:
        return QuickReduceCollective(setup, crossover, library)
    except CannotMap as err:
        logger.warning("%s; the all-reduce uses NCCL", err)
        return library
