"""Which FFN instance holds which expert.

Each FFN instance has *expert slots*, numbered across all instances. A slot holds one expert per
layer. Without spare slots every expert is held once. Spare slots hold further copies of busy
experts. Exactly one copy computes a row's expert: the attention side chooses it and sends its slot
number instead of the expert's number. In a deployment whose FFN instances come and go, slots may be
empty: every instance has as many as the fewest instances need.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.errors import ConfigError
from afd.topology import expert_ranges

Table = tuple[int, ...]
"""The expert in each slot of one layer."""
EMPTY = -1
"""In a table: the slot holds no expert."""


@dataclass(frozen=True)
class Placement:
    """Experts of all FFN instances.

    bounds: instance j holds the slots [bounds[j], bounds[j + 1]). tables: one per MoE layer.
    """

    bounds: tuple[int, ...]
    tables: tuple[Table, ...]

    @property
    def slots(self) -> int:
        """Number of slots of all instances."""
        return self.bounds[-1]

    def range_of(self, instance: int) -> tuple[int, int]:
        return self.bounds[instance], self.bounds[instance + 1]


def slot_bounds(
    num_experts: int, instances: int, redundant: int, capacity: int | None = None
) -> tuple[int, ...]:
    """Returns the bounds of the instances' slots, with ``redundant`` spare slots per instance.

    capacity: instances that can run at a time, if they come and go; each then has as many slots as
    the largest of ``instances``.

    Raises:
        ConfigError: there are more instances than experts, or so many spare slots that an instance
            would hold an expert twice.
    """
    ranges = expert_ranges(num_experts, instances)
    smallest = min(end - start for start, end in ranges)
    room = num_experts - max(end - start for start, end in ranges)
    if redundant > room:
        raise ConfigError(
            f"ffn.redundant_experts is {redundant}, but besides its own {smallest} of {num_experts}"
            f" experts an instance can hold at most {room} more; use {room} or fewer"
        )
    sizes = [end - start + redundant for start, end in ranges]
    sizes = sizes if capacity is None else [max(sizes)] * capacity
    return tuple(itertools.accumulate(sizes, initial=0))


def contiguous(num_experts: int, bounds: Sequence[int], layers: int) -> Placement:
    """Returns the initial placement, for unknown load.

    Instance j holds the j-th range of experts. Its spare slots hold the experts that follow; expert
    0 follows the last one.
    """
    table = spread(num_experts, bounds, range(len(bounds) - 1), num_experts)
    return Placement(tuple(bounds), (table,) * layers)


def spread(num_experts: int, bounds: Sequence[int], active: Sequence[int], redundant: int) -> Table:
    """Returns a table for unknown load that uses the instances ``active`` only; ascending.

    Each has a range of experts, and up to ``redundant`` copies of the experts that follow, as far
    as its slots go. Raises ConfigError if the experts do not fit.
    """
    table = [EMPTY] * bounds[-1]
    for j, (start, end) in zip(active, expert_ranges(num_experts, len(active)), strict=True):
        room, own = bounds[j + 1] - bounds[j], end - start
        if own > room:
            raise ConfigError(
                f"{num_experts} experts per layer do not fit on {len(active)} FFN instances with"
                f" {room} expert slots each; keep more of them, or start the deployment with"
                " fewer ffn.instances or more ffn.redundant_experts"
            )
        held = min(own + redundant, room, num_experts)
        experts = sorted((start + i) % num_experts for i in range(held))
        table[bounds[j] : bounds[j] + held] = experts
    return tuple(table)


def holders(tables: Iterable[Table], bounds: Sequence[int]) -> tuple[int, ...]:
    """Returns the instances that hold an expert in one of the tables."""
    parts = list(itertools.pairwise(bounds))
    kinds = set(tables)  # most layers have the same
    return tuple(
        j for j, (low, high) in enumerate(parts) if any({*t[low:high]} - {EMPTY} for t in kinds)
    )


def problem(table: Sequence[int], bounds: Sequence[int], num_experts: int) -> str | None:
    """Returns why a table cannot be used, or None if it can."""
    if len(table) != bounds[-1]:
        return f"it fills {len(table)} slots, but there are {bounds[-1]}"
    wrong = next((e for e in table if not EMPTY <= e < num_experts), None)
    if wrong is not None:
        return f"it names expert {wrong}, but experts are numbered 0 to {num_experts - 1}"
    if missing := set(range(num_experts)) - set(table):
        return f"no instance holds expert {min(missing)}"
    for j, (low, high) in enumerate(itertools.pairwise(bounds)):
        held = [e for e in table[low:high] if e != EMPTY]
        if len(set(held)) < len(held):
            return f"instance {j} holds an expert twice"
    return None


def copies(table: Sequence[int], num_experts: int) -> tuple[tuple[int, ...], ...]:
    """Returns the slots of every expert, ascending."""
    slots: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(table):
        if expert != EMPTY:
            slots[expert].append(slot)
    return tuple(tuple(of_expert) for of_expert in slots)


def save_placement(path: Path, placement: Placement) -> None:
    """Write a file for the key ``ffn.placement``."""
    data = {"bounds": placement.bounds, "tables": placement.tables}
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


def load_placement(path: Path, num_experts: int, bounds: tuple[int, ...], layers: int) -> Placement:
    """Read a placement file and check it against the deployment.

    Raises:
        ConfigError: it is no placement file, or it was made for another model or topology.
    """
    remedy = "make a new one with `afd placement`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = Placement(tuple(data["bounds"]), tuple(tuple(table) for table in data["tables"]))
    except (OSError, ValueError, KeyError, TypeError) as err:
        reason = " ".join(str(err).split())[:120]
        raise ConfigError(f"ffn.placement {path} cannot be read ({reason}); {remedy}") from None
    if found.bounds != bounds or len(found.tables) != layers:
        raise ConfigError(
            f"ffn.placement {path} has slots up to {list(found.bounds[1:])} in"
            f" {len(found.tables)} layers, but this deployment has {list(bounds[1:])} in {layers};"
            f" {remedy}"
        )
    for number, table in enumerate(found.tables):
        wrong = problem(table, bounds, num_experts)
        if wrong is not None:
            raise ConfigError(f"ffn.placement {path}, MoE layer number {number}: {wrong}; {remedy}")
    return found
