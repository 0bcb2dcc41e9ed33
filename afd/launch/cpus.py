"""Which cores each role computes on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afd.config import CoreLists, Deployment

Cores = tuple[int, ...]


@dataclass(frozen=True)
class CpuPlan:
    """Cores of each attention instance by index, and of each FFN rank by number.

    Gateway, control plane and the HTTP side of attention are not pinned: they mostly sleep.
    """

    attention: tuple[Cores, ...]
    ffn: tuple[Cores, ...]


def cpu_plan(available: Sequence[int], attention: int, ffn: int) -> CpuPlan:
    """Share ``available`` cores among ``attention`` + ``ffn`` instances.

    Every instance gets a contiguous run of cores, so that neighbours in cache stay together, and
    the first instances one core more where the division leaves a rest. With fewer cores than
    instances, cores are dealt out in turn and shared.
    """
    cores, roles = tuple(available), attention + ffn
    if not cores:
        raise ValueError("no cores are available")
    if roles > len(cores):
        lists: list[Cores] = [(cores[i % len(cores)],) for i in range(roles)]
    else:
        share, rest = divmod(len(cores), roles)
        ends = [share * (i + 1) + min(i + 1, rest) for i in range(roles)]
        starts = [0, *ends[:-1]]
        lists = [cores[start:end] for start, end in zip(starts, ends, strict=True)]
    return CpuPlan(tuple(lists[:attention]), tuple(lists[attention:]))


def plan_for(deployment: Deployment, available: Sequence[int]) -> CpuPlan:
    """The plan of a deployment: core lists given in the file win over the automatic ones."""
    auto = cpu_plan(available, deployment.attention.instances, deployment.ffn.ranks)
    return CpuPlan(
        _given(deployment.attention.cpus, auto.attention), _given(deployment.ffn.cpus, auto.ffn)
    )


def _given(wanted: CoreLists, auto: tuple[Cores, ...]) -> tuple[Cores, ...]:
    return auto if wanted == "auto" else wanted
