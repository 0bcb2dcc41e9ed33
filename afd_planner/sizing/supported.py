"""What of a request `afd serve` does not run. The planner recommends nothing of that."""

from __future__ import annotations

from afd.models import FAMILIES, Family
from afd_planner.sizing.request import Request

MOST_DRAFTS = 16
"""Largest ``attention.speculation.num_speculative_tokens``."""


def served_family(request: Request) -> Family | None:
    """Returns the family with which `afd serve` serves the model, or None."""
    name = request.model.architecture
    return next((family for family in FAMILIES if name in family.vllm_class), None)


def not_served(request: Request) -> tuple[str, ...]:
    """Returns one phrase for each part of the request that `afd serve` does not run."""
    family = served_family(request)
    found = []
    if not request.model.moe_layers:
        found.append("dense models")
    elif family is None:
        found.append(f"{request.model.architecture}")
    elif family.split and max(request.depths) > 1:
        found.append(f"{request.model.architecture} at a depth above 1 (give --depth 1)")
    if request.positions - 1 > MOST_DRAFTS:
        found.append(f"speculation with more than {MOST_DRAFTS} drafts")
    if len({gpu.vendor for gpu in (*request.attention, *request.ffn)}) > 1:
        found.append("accelerators of two makers in one deployment")
    if any(gpu.vendor not in ("nvidia", "amd") for gpu in (*request.attention, *request.ffn)):
        found.append("accelerators of other makers than NVIDIA and AMD")
    return tuple(found)
