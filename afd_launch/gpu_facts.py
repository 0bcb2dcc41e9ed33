"""Data-sheet values of this host's GPUs, from the planner's files."""

from __future__ import annotations

from afd_launch.installation import find_gpus
from afd_planner.facts.hardware import accelerators, load_accelerator


def scale_up_gbytes(names: tuple[str, ...] | None = None) -> float | None:
    """GB/s per GPU and direction to the other GPUs of the host; None for GPUs without a file.

    names: of the GPUs, as nvidia-smi and rocminfo give them; None: this host's.
    """
    found = find_gpus().names if names is None else names
    rates = [_rate(name) for name in found]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def _rate(name: str) -> float | None:
    words = {*name.lower().replace("-", " ").split()}
    for file in accelerators():
        accelerator = load_accelerator(file)
        if file in words or accelerator.architecture == name:
            return accelerator.scale_up_bandwidth / 1e9
    return None
