"""Which FFN instance holds which expert, and how to rebalance them by measured load.

Each FFN instance has *expert slots*, numbered across all instances. A slot holds one expert per
layer. Without spare slots every expert is held once. Spare slots hold further copies of busy
experts. Exactly one copy computes a row's expert: the attention side chooses it and sends its slot
number instead of the expert's number.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.errors import ConfigError
from afd.topology import expert_ranges

Table = tuple[int, ...]
"""The expert in each slot of one layer."""
Load = Sequence[Sequence[float]]
"""[layers][experts]: number of rows that chose an expert, in any unit."""

MIN_GAIN = 0.02
"""A layer is rebalanced only if the load of its busiest instance falls by at least this share. Less
does not pay for reading the layer's weights again, and is within the noise of the load."""


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


def slot_bounds(num_experts: int, instances: int, redundant: int) -> tuple[int, ...]:
    """Returns the bounds of the instances' slots, with ``redundant`` spare slots per instance.

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
    return tuple(itertools.accumulate(sizes, initial=0))


def contiguous(num_experts: int, bounds: Sequence[int], layers: int) -> Placement:
    """Returns the initial placement, for unknown load.

    Instance j holds the j-th range of experts. Its spare slots hold the experts that follow; expert
    0 follows the last one.
    """
    table: list[int] = []
    ranges = expert_ranges(num_experts, len(bounds) - 1)
    for (start, _), (low, high) in zip(ranges, itertools.pairwise(bounds), strict=True):
        table += sorted((start + i) % num_experts for i in range(high - low))
    return Placement(tuple(bounds), (tuple(table),) * layers)


def problem(table: Sequence[int], bounds: Sequence[int], num_experts: int) -> str | None:
    """Returns why a table cannot be used, or None if it can."""
    if len(table) != bounds[-1]:
        return f"it fills {len(table)} slots, but there are {bounds[-1]}"
    wrong = next((e for e in table if not 0 <= e < num_experts), None)
    if wrong is not None:
        return f"it names expert {wrong}, but experts are numbered 0 to {num_experts - 1}"
    if missing := set(range(num_experts)) - set(table):
        return f"no instance holds expert {min(missing)}"
    for j, (low, high) in enumerate(itertools.pairwise(bounds)):
        if len(set(table[low:high])) < high - low:
            return f"instance {j} holds an expert twice"
    return None


def copies(table: Sequence[int], num_experts: int) -> tuple[tuple[int, ...], ...]:
    """Returns the slots of every expert, ascending."""
    slots: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(table):
        slots[expert].append(slot)
    return tuple(tuple(of_expert) for of_expert in slots)


def instance_loads(
    table: Sequence[int], bounds: Sequence[int], load: Sequence[float]
) -> tuple[float, ...]:
    """Returns the load of each instance in one layer. Copies share an expert's load equally."""
    count = [len(slots) for slots in copies(table, len(load))]
    return tuple(
        sum(load[e] / count[e] for e in table[low:high]) for low, high in itertools.pairwise(bounds)
    )


def imbalance(table: Sequence[int], bounds: Sequence[int], load: Sequence[float]) -> float:
    """Returns the load of the busiest instance divided by the mean; 1 if there is no load."""
    loads = instance_loads(table, bounds, load)
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def balance(load: Sequence[float], bounds: Sequence[int]) -> Table:
    """Returns a balanced table for one layer.

    Greedy: each spare slot goes to the expert with the most load per copy. Then the copies, largest
    load first, go to the least loaded instance with a free slot. An expert has at most one copy per
    instance.
    """
    instances = len(bounds) - 1
    count = [1] * len(load)
    for _ in range(bounds[-1] - len(load)):
        open_ones = [e for e in range(len(load)) if count[e] < instances]
        count[max(open_ones, key=lambda e: (load[e] / count[e], -count[e], -e))] += 1
    room = [high - low for low, high in itertools.pairwise(bounds)]
    held: list[set[int]] = [set() for _ in room]
    total = [0.0] * instances
    # Of equal loads, experts with more copies come first: they fit on fewer instances.
    order = sorted(range(len(load)), key=lambda e: (-load[e] / count[e], -count[e], e))
    for expert in order:
        for _ in range(count[expert]):
            j = _take_place(expert, room, held, total, load, count)
            held[j].add(expert)
            total[j] += load[expert] / count[expert]
    return tuple(e for experts in held for e in sorted(experts))


def _take_place(
    expert: int,
    room: list[int],
    held: list[set[int]],
    total: list[float],
    load: Sequence[float],
    count: Sequence[int],
) -> int:
    """Returns the instance that gets the next copy of ``expert``, and takes one of its free slots.

    If every instance with a free slot already holds the expert, a full instance gives its lightest
    other expert to one of them and takes the copy.
    """
    free = [j for j, left in enumerate(room) if left and expert not in held[j]]
    if free:
        j = min(free, key=lambda i: (total[i], i))
        room[j] -= 1
        return j
    full = min(j for j, left in enumerate(room) if left)
    donors = [j for j in range(len(room)) if expert not in held[j]]
    j = min(donors, key=lambda i: (total[i], i))
    passed = min(held[j] - held[full], key=lambda e: (load[e] / count[e], e))
    held[j].remove(passed)
    held[full].add(passed)
    for i, sign in ((j, -1), (full, 1)):
        total[i] += sign * load[passed] / count[passed]
    room[full] -= 1
    return j


def improved(
    now: Sequence[Table], proposed: Sequence[Table], bounds: Sequence[int], load: Load
) -> tuple[Table, ...]:
    """Returns, per layer, the proposed table if it gains MIN_GAIN or more, else the present one."""
    chosen = []
    for old, new, of_layer in zip(now, proposed, load, strict=True):
        before = max(instance_loads(old, bounds, of_layer))
        after = max(instance_loads(new, bounds, of_layer))
        chosen.append(new if after < (1 - MIN_GAIN) * before else old)
    return tuple(chosen)


def sorted_by_instance(table: Sequence[int], bounds: Sequence[int]) -> Table:
    """Returns the same placement with each instance's experts in ascending order."""
    parts = (sorted(table[low:high]) for low, high in itertools.pairwise(bounds))
    return tuple(itertools.chain.from_iterable(parts))


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
