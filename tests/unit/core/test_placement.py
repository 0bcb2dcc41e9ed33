"""Placement of experts: slots, balancing, placement files."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.errors import ConfigError
from afd.placement.tables import (
    EMPTY,
    Placement,
    contiguous,
    copies,
    holders,
    load_placement,
    problem,
    save_placement,
    slot_bounds,
    spread,
)
from afd.topology import expert_ranges
from afd_launch.balance import balance, imbalance, improved, instance_loads, without_empty


@st.composite
def pools(draw):
    experts = draw(st.integers(2, 40))
    instances = draw(st.integers(1, min(6, experts)))
    room = experts - max(end - start for start, end in expert_ranges(experts, instances))
    redundant = draw(st.integers(0, min(room, 6)))
    return experts, instances, slot_bounds(experts, instances, redundant)


loads = st.floats(0, 1e6, allow_nan=False)


@settings(max_examples=200)
@given(pools(), st.data())
def test_tables_fill_every_slot_and_hold_every_expert(pool, data):
    experts, _, bounds = pool
    load = data.draw(st.lists(loads, min_size=experts, max_size=experts))
    for table in (balance(load, bounds), contiguous(experts, bounds, 1).tables[0]):
        assert problem(table, bounds, experts) is None
        assert sum(len(slots) for slots in copies(table, experts)) == bounds[-1]
        assert sum(instance_loads(table, bounds, load)) == pytest.approx(sum(load))


@settings(max_examples=100)
@given(pools(), st.data())
def test_a_layer_moves_only_if_that_relieves_its_busiest_instance(pool, data):
    experts, _, bounds = pool
    load = data.draw(st.lists(loads, min_size=experts, max_size=experts))
    now = contiguous(experts, bounds, 1).tables
    (after,) = improved(now, [balance(load, bounds)], bounds, [load])
    busiest = [max(instance_loads(table, bounds, load)) for table in (now[0], after)]
    assert after == now[0] or busiest[1] < 0.981 * busiest[0]


def test_copies_go_to_the_busiest_expert_and_balance_the_instances():
    load = [8.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    bounds = slot_bounds(6, 2, redundant=1)
    assert imbalance(contiguous(6, slot_bounds(6, 2, 0), 1).tables[0], (0, 3, 6), load) == 10 / 6
    table = balance(load, bounds)
    assert next(len(slots) for slots in copies(table, 6)) == 2
    assert imbalance(table, bounds, load) == pytest.approx(6.5 / 6)  # 4 + 1 + 1 + 0.5


def test_the_first_placement_copies_experts_of_the_next_instance():
    placement = contiguous(6, slot_bounds(6, 3, redundant=2), 2)
    assert placement.bounds == (0, 4, 8, 12)
    assert placement.tables == ((0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 4, 5),) * 2
    assert placement.range_of(1) == (4, 8)


def test_too_many_copies_are_refused():
    with pytest.raises(ConfigError, match=r"redundant_experts is 4.* use 3 or fewer"):
        slot_bounds(6, 2, redundant=4)
    with pytest.raises(ConfigError, match="use 0 or fewer"):
        slot_bounds(6, 1, redundant=1)


@pytest.mark.parametrize(
    "table,reason",
    [
        ((0, 1, 2), "3 slots, but there are 4"),
        ((0, 1, 2, 7), "names expert 7, but experts are numbered 0 to 3"),
        ((0, 1, 0, 2), "no instance holds expert 3"),
    ],
)
def test_bad_tables_are_named(table, reason):
    assert reason in problem(table, (0, 2, 4), 4)
    assert "holds an expert twice" in problem((0, 0, 1, 2), (0, 2, 4), 3)


def test_wrong_files_are_errors_that_name_the_mistake(tmp_path):
    path = tmp_path / "p.json"
    placement = contiguous(6, slot_bounds(6, 2, 1), 3)
    save_placement(path, placement)
    assert load_placement(path, 6, placement.bounds, 3) == placement
    with pytest.raises(ConfigError, match="afd placement"):
        load_placement(tmp_path / "none.json", 6, placement.bounds, 3)
    with pytest.raises(
        ConfigError, match=r"\[4, 8\] in 3 layers, but this deployment has \[4, 8\] in 2"
    ):
        load_placement(path, 6, placement.bounds, 2)
    data = json.loads(path.read_text())
    data["tables"][1][0] = 9
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="number 1: "):
        load_placement(path, 6, placement.bounds, 3)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_placement(path, 6, placement.bounds, 3)


@given(st.data())
@settings(max_examples=50)
def test_experts_spread_over_the_instances_that_run(data):
    experts = data.draw(st.integers(2, 40))
    instances = data.draw(st.integers(1, min(6, experts)))
    redundant = data.draw(st.integers(0, experts - -(-experts // instances)))
    more = data.draw(st.integers(0, 2))
    bounds = slot_bounds(experts, instances, redundant, instances + more)
    assert len({b - a for a, b in pairwise(bounds)}) == 1
    everyone = range(len(bounds) - 1)
    size = data.draw(st.integers(1, min(experts, len(everyone))))
    active = sorted(data.draw(st.permutations(everyone))[:size])
    if -(-experts // size) > bounds[1]:
        with pytest.raises(ConfigError, match=f"do not fit on {size} FFN instances with"):
            spread(experts, bounds, active, redundant)
        return
    table = spread(experts, bounds, active, redundant)
    assert problem(table, bounds, experts) is None
    assert holders([table], bounds) == tuple(active)
    held = [sum(e != EMPTY for e in table[low:high]) for low, high in pairwise(bounds)]
    wanted = min(experts // size + redundant, experts, bounds[1])
    assert min(held[j] for j in active) >= wanted


def test_a_placement_with_empty_slots_is_balanced_over_those_in_use():
    bounds = slot_bounds(8, 2, 1, 3)
    placement = Placement(bounds, (spread(8, bounds, (0, 2), 1),) * 2)
    packed, unpack = without_empty(placement)
    assert packed.bounds == (0, 5, 10) and unpack(packed.tables) == placement
    load = [9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    moved = unpack([balance(load, packed.bounds)] * 2)
    assert holders(moved.tables, bounds) == (0, 2)
    assert problem(moved.tables[0], bounds, 8) is None
    before, after = (imbalance(p.tables[0], bounds, load) for p in (placement, moved))
    assert after < before == imbalance(packed.tables[0], packed.bounds, load)
