"""Assigns CPU cores to roles. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afd.config.deployment import Deployment
from afd.config.sections import CoreLists
from afd.errors import ConfigError

Cores = tuple[int, ...]


@dataclass(frozen=True)
class CpuPlan:
    """Cores of each attention instance by index, and of each FFN rank by number.

    The gateway, the control plane and the HTTP servers of attention instances are not pinned.
    """

    attention: tuple[Cores, ...]
    ffn: tuple[Cores, ...]


def cpu_plan(available: Sequence[int], attention: int, ffn: int) -> CpuPlan:
    """Shares ``available`` cores among ``attention`` + ``ffn`` processes.

    Each process gets contiguous cores, which share caches. If the division leaves a remainder, the
    first processes get one core more. With fewer cores than processes, cores are assigned round
    robin and shared.
    """
    cores, roles = tuple(available), attention + ffn
    if not cores:
        raise ValueError("no cores are available")
    if not roles:
        return CpuPlan((), ())
    if roles > len(cores):
        lists: list[Cores] = [(cores[i % len(cores)],) for i in range(roles)]
    else:
        share, rest = divmod(len(cores), roles)
        ends = [share * (i + 1) + min(i + 1, rest) for i in range(roles)]
        starts = [0, *ends[:-1]]
        lists = [cores[start:end] for start, end in zip(starts, ends, strict=True)]
    return CpuPlan(tuple(lists[:attention]), tuple(lists[attention:]))


def plan_for(deployment: Deployment, available: Sequence[int], host: str = "") -> CpuPlan:
    """The plan of one host. Core lists in the file replace the automatic ones.

    Args:
        available: cores of the host. host: its name; "" if the file names no hosts.

    Returns:
        cores for the host's own instances and ranks; () for those of other hosts. An attention
        instance divides its cores among its ranks. Instances that can be added share the cores of
        the others of their role.

    Raises:
        ConfigError: the file names a core that is not available.
    """
    attention, ffn = deployment.attention, deployment.ffn
    place = deployment.place_of(host)
    first, spare = (
        [j * ffn.tp + rank for j in some for rank in range(ffn.tp)]
        for some in (place.ffn, place.spare_ffn)
    )
    auto = cpu_plan(available, len(place.attention) * attention.tp, len(first))
    first_ranks = range(0, len(auto.attention), attention.tp)
    of_ranks = [auto.attention[first : first + attention.tp] for first in first_ranks]
    merged = [tuple(dict.fromkeys(itertools.chain(*lists))) for lists in of_ranks]
    shared = itertools.cycle(merged or [tuple(available)])
    cores = dict(zip((*place.attention, *place.spare), shared, strict=False))
    shared_ffn = itertools.cycle(auto.ffn or [tuple(available)])
    ffn_cores = dict(zip((*first, *spare), shared_ffn, strict=False))
    return CpuPlan(
        _given("attention.cpus", attention.cpus, cores, attention.capacity, available),
        _given("ffn.cpus", ffn.cpus, ffn_cores, ffn.ranks, available),
    )


def _given(
    setting: str,
    wanted: CoreLists,
    auto: Mapping[int, Cores],
    processes: int,
    available: Sequence[int],
) -> tuple[Cores, ...]:
    """auto: automatic cores of the processes of this host, by number among all ``processes``."""
    if wanted == "auto":
        return tuple(auto.get(number, ()) for number in range(processes))
    missing = {core for number in auto for core in wanted[number]} - set(available)
    if missing:
        raise ConfigError(
            f"{setting} names cores that this process must not use"
            f" ({', '.join(map(str, sorted(missing)))}); it may use"
            f" {', '.join(map(str, available))}"
        )
    return wanted
