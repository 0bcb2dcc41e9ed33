"""Live expert moves: experts change their slots while the deployment serves."""

from __future__ import annotations

import random
import threading
import time

import msgspec
import pytest
import torch
from control_support import contract_with, eventually
from remote_support import Traffic, in_background, run_step

from afd.control.messages import Member, Members
from afd.control.moves import Moves, followed, in_use, objection, settled, to_hold
from afd.placement.tables import contiguous
from afd_launch.balance import balance

LAYERS = (1, 2, 3)
BOUNDS = (0, 5, 10)
START = contiguous(8, BOUNDS, len(LAYERS))
CONTRACT = contract_with(expert_slots=BOUNDS, expert_map=START.tables)


def some_tables(rng, num_experts=8, bounds=BOUNDS, layers=3):
    return tuple(balance([rng.random() for _ in range(num_experts)], bounds) for _ in range(layers))


@pytest.mark.parametrize("seed", range(25))
def test_late_snapshots_never_route_to_experts_that_are_not_held(seed):
    """Two FFN and two attention instances see snapshots late, in any order."""
    rng = random.Random(seed)
    everyone = [("ffn", 0, 0), ("ffn", 1, 0), ("attention", 0, 0), ("attention", 1, 0)]
    members = Members(1, tuple(Member(role, i, 1) for role, i, _ in everyone))
    seen = dict.fromkeys(everyone, members)
    moves = Moves()
    for tables in (some_tables(rng), some_tables(rng)):
        members = moves.plan(tables, CONTRACT, members)
        for _ in range(2000):
            if not members.moves_left:
                break
            who = rng.choice(everyone)
            if rng.random() < 0.5:
                seen[who] = members
            done = {
                w: snapshot.moves if w[0] == "ffn" else followed(snapshot)
                for w, snapshot in seen.items()
            }
            members = moves.advance(members, CONTRACT, done) or members
            for role, i, _ in everyone:
                if role == "attention":
                    asked = in_use(seen[role, i, 0], START, LAYERS)
                    for j in (0, 1):
                        held = to_hold(seen["ffn", j, 0], START, LAYERS)
                        assert all(held[n].get(b) == table for n, (b, table) in asked.items())
        assert members.moves_left == 0
        assert tuple(t for _, t in settled(members, START, LAYERS).values()) == tables
        assert {n for n, (bank, _) in settled(members, START, LAYERS).items() if bank} <= set(
            LAYERS
        )


def test_a_failed_move_cancels_all_pending_moves():
    moves = Moves()
    members = moves.plan(some_tables(random.Random(1)), CONTRACT, Members())
    assert (members.moves, members.moves_left) == (1, 3)
    off = moves.give_up(members, "ffn-1: no such file")
    assert (off.moving, off.moves_left, off.move_fault) == (None, 0, "ffn-1: no such file")
    assert moves.plan(START.tables, CONTRACT, off).moves_left == 0
    again = moves.plan(some_tables(random.Random(1)), CONTRACT, off)
    assert (again.moves, again.move_fault) == (2, "")


def test_invalid_moves_are_refused_with_a_reason():
    tables = some_tables(random.Random(2))
    assert objection(tables, CONTRACT, Members()) is None
    assert "no member" in objection(tables, None, Members())
    alone = msgspec.structs.replace(CONTRACT, ffn_instances=1)
    assert "one FFN instance" in objection(tables, alone, Members())
    assert "2 tables for 3" in objection(tables[1:], CONTRACT, Members())
    assert "layer 3" in objection((*tables[:2], tables[2][1:]), CONTRACT, Members())
    busy = Moves().plan(tables, CONTRACT, Members())
    assert "layer 1 is being moved" in objection(tables, CONTRACT, busy)


def tables_for(deployed, seed):
    model, bounds = deployed.resolved.model, deployed.resolved.placement.bounds
    return some_tables(random.Random(seed), model.num_experts, bounds, len(model.moe_layers))


def await_settled(deployed):
    """Waits until the FFN loops, on their own threads, hold the tables that were asked for."""
    layers = deployed.resolved.model.moe_layers
    places = settled(deployed.registry.members, deployed.resolved.placement, layers)

    def all_held():
        for loop in deployed.loops.values():
            start, end = loop.rank.model.shard.slots
            for layer, (bank, table) in places.items():
                if loop.rank.model.banks.held(layer) != {bank: table[start:end]}:
                    return False
        return True

    eventually(all_held, 10.0)


@pytest.mark.parametrize("dispatch", ["broadcast", "routed"])
def test_experts_move_under_load(deploy, dispatch):
    deployed, expected = deploy(
        "deepseek_v3", 2, 2, wire={"dispatch": dispatch}, ffn={"redundant_experts": 1}
    )
    with Traffic(deployed, expected):
        for seed in (1, 2):
            time.sleep(0.05)
            deployed.move(tables_for(deployed, seed))
    await_settled(deployed)


def test_an_idle_instance_does_not_delay_a_move(deploy):
    deployed, expected = deploy("qwen3_moe", 2, 2)
    deployed.move(tables_for(deployed, 3), deadline_s=5.0)
    with Traffic(deployed, expected):
        time.sleep(0.05)


class Aside:
    """A context; entered: how often."""

    entered, inside = 0, False

    def __enter__(self):
        self.entered, self.inside = self.entered + 1, True

    def __exit__(self, *_):
        self.inside = False


def test_work_on_the_weights_leaves_the_streams_of_steps_alone(deploy, monkeypatch):
    """There, it would wait for the messages of a step, and messages for it."""
    deployed, _ = deploy("qwen3_moe", 1, 2)
    loop = deployed.loops[0]
    banks, aside = loop.rank.model.banks, Aside()
    monkeypatch.setattr(banks, "aside", lambda: aside)
    added = banks.add
    monkeypatch.setattr(banks, "add", lambda *a: (added(*a), inside.append(aside.inside)))
    inside = []
    held = {layer: banks.held(layer) for layer in deployed.resolved.model.moe_layers}
    loop.moves.warm_up()
    assert inside == [True, True]  # with an expert, and without any
    assert held == {layer: banks.held(layer) for layer in deployed.resolved.model.moe_layers}
    before = aside.entered
    banks.expert_rows()
    assert aside.entered == before + 1


def test_an_ffn_instance_that_dies_in_a_move_completes_it_after_restart(deploy):
    deployed, expected = deploy("qwen3_moe", 1, 2, ffn={"redundant_experts": 1})
    with Traffic(deployed, expected) as traffic:
        for seed, pause in ((4, 0.0), (5, 0.02)):
            mover = threading.Thread(target=deployed.move, args=(tables_for(deployed, seed),))
            mover.start()
            time.sleep(pause)
            deployed.stop_ffn(1)
            time.sleep(0.05)
            deployed.start_ffn(1)
            mover.join(20)
            assert not mover.is_alive()
            before = traffic.steps[0]
            while traffic.steps[0] < before + 2 and not traffic.errors:
                time.sleep(0.01)
    assert deployed.registry.members.moves_left == 0


def test_a_dropped_attention_instance_resends_its_rows_to_the_new_slots(deploy):
    """No move waits for a dropped instance, so its pending rows name slots that are gone."""
    deployed, expected = deploy("qwen3_moe", 1, 2, wire={"dispatch": "routed"})
    client, registry = deployed.clients[0], deployed.registry
    gone = threading.Event()

    def steps():
        for step in range(3):
            run_step(client, deployed.resolved, expected, [3, 2, 1], step, pause=0.03)
            gone.set()

    thread, failure = in_background(steps)
    thread.start()
    gone.wait(10)
    old = deployed.members.pop("attention-0")
    # attention-0 is dropped; the deployment continues without it.
    registry.set(*deployed.members.values())
    deployed.move(tables_for(deployed, 6))
    deployed.generation += 1
    fresh = msgspec.structs.replace(old, generation=deployed.generation)
    client._sessions._control.generation = deployed.generation
    deployed.members["attention-0"] = fresh
    registry.set(*deployed.members.values())
    thread.join(20)
    assert not thread.is_alive() and not failure, failure


def test_experts_that_are_not_held_are_detected(deploy):
    deployed, _ = deploy("qwen3_moe", 1, 2)
    model, layer = deployed.loops[0].rank.model, deployed.resolved.model.moe_layers[0]
    ids = torch.arange(model.shard.total_slots, dtype=torch.int32).view(-1, 2)
    assert model.banks.holds(layer, ids) and model.banks.holds(layer, torch.full_like(ids, -1))
    assert not model.banks.holds(layer, ids + model.shard.total_slots)  # bank 1
    deployed.move(tables_for(deployed, 8))
    await_settled(deployed)
    assert model.banks.holds(layer, ids + model.shard.total_slots)
    assert not model.banks.holds(layer, ids)
    # A call over several attention instances: one lost, one of each bank.
    lost, new = torch.full_like(ids, -1), ids + model.shard.total_slots
    assert model.banks.holds(layer, torch.cat([lost, new]))
    assert not model.banks.holds(layer, torch.cat([lost, new, ids]))


def test_loads_are_counted_per_expert(deploy):
    deployed, expected = deploy("qwen3_moe", 1, 2, ffn={"redundant_experts": 1})
    run_step(deployed.clients[0], deployed.resolved, expected, [5, 4], 1)
    deployed.move(tables_for(deployed, 7))
    run_step(deployed.clients[0], deployed.resolved, expected, [5, 4], 1)
    model = deployed.resolved.model
    loads = [loop.rank.model.banks.expert_rows() for loop in deployed.loops.values()]
    for layer in model.moe_layers:
        rows = [sum(load[layer][e] for load in loads) for e in range(model.num_experts)]
        assert sum(rows) == 2 * (5 + 4) * model.top_k
        # Both steps have the same rows, and a move does not change the counts per expert.
        assert all(n % 2 == 0 for n in rows)
