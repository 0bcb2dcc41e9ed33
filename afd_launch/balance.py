"""Balances experts over the FFN instances by measured load. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from afd.errors import ConfigError
from afd.placement.tables import EMPTY, Placement, Table, copies, holders

Load = Sequence[Sequence[float]]
"""[layers][experts]: number of rows that chose an expert, in any unit."""

MIN_GAIN = 0.02
"""A layer is rebalanced only if the load of its busiest instance falls by at least this share. Less
does not pay for reading the layer's weights again, and is within the noise of the load."""


def instance_loads(
    table: Sequence[int], bounds: Sequence[int], load: Sequence[float]
) -> tuple[float, ...]:
    """Returns the load of each instance in one layer. Copies share an expert's load equally."""
    count = [len(slots) for slots in copies(table, len(load))]
    return tuple(
        sum(load[e] / count[e] for e in table[low:high] if e != EMPTY)
        for low, high in itertools.pairwise(bounds)
    )


def imbalance(table: Sequence[int], bounds: Sequence[int], load: Sequence[float]) -> float:
    """Returns the load of the busiest instance divided by the mean of those that hold experts; 1 if
    there is no load."""
    loads = instance_loads(table, bounds, load)
    used = len(holders([tuple(table)], bounds))
    return max(loads) * used / sum(loads) if sum(loads) else 1.0


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


def without_empty(
    placement: Placement,
) -> tuple[Placement, Callable[[Sequence[Table]], Placement]]:
    """Returns the placement without empty slots and without instances that hold no experts, and a
    function that puts tables of that shape back.

    Raises:
        ConfigError: an instance has more experts in one layer than in another.
    """
    parts = list(itertools.pairwise(placement.bounds))

    def counts(table: Table) -> list[int]:
        return [sum(e != EMPTY for e in table[low:high]) for low, high in parts]

    held = counts(placement.tables[0])
    if any(counts(table) != held for table in placement.tables):
        raise ConfigError(
            "the layers do not have the same empty expert slots, which the balancer needs; use a"
            " placement file without empty slots"
        )
    bounds = (0, *itertools.accumulate(n for n in held if n))

    def unpack(tables: Sequence[Table]) -> Placement:
        whole = []
        for table in tables:
            experts, filled = iter(table), []
            for (low, high), count in zip(parts, held, strict=True):
                filled += [*itertools.islice(experts, count), *[EMPTY] * (high - low - count)]
            whole.append(tuple(filled))
        return Placement(placement.bounds, tuple(whole))

    packed = tuple(tuple(e for e in table if e != EMPTY) for table in placement.tables)
    return Placement(bounds, packed), unpack
