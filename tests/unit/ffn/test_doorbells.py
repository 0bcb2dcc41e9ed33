"""Messages of attention ranks, read in arrays, against a plain model with one object per rank."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from afd.topology import SlotMap
from afd.wire.layout import Kind
from afd.wire.message import message
from afd_comm import Link, Region, Status, make_flag
from ffn_worker.pool.doorbells import Doorbells
from ffn_worker.pool.order_format import PARTS, Part, Parts, gets
from ffn_worker.row_table import RowTable

RANKS, DEPTH, STEPS = 5, 2, 1500


@dataclass
class Rank:
    """One session. unread: kinds of the control messages in the slot, at most the last two."""

    session: int
    generation: int
    controls: int = 0
    requests: list[int] = field(default_factory=lambda: [0] * DEPTH)
    waiting: set[int] = field(default_factory=set)  # micro-batches with a request not taken
    unread: list[tuple[Kind, Part]] = field(default_factory=list)
    active: bool = False
    announced: Part | None = None


class Model:
    """Sends messages as attention ranks do, and knows what has to be seen of them."""

    def __init__(self, region: Region, slots: SlotMap, rng: random.Random) -> None:
        self.link = Link(region.addresses, timeout_us=1_000_000)
        self.slots, self.rng = slots, rng
        self.ranks: dict[int, Rank] = {}
        self.session = 0

    def post(self, slot: int, flag: int, **words: int) -> None:
        rows = words.pop("rows", 1)
        said = message(slot, [], rows, **{"layer": -1, "micro_batch": -1, **words})
        assert self.link.post(said, flag) == Status.OK

    def join(self, i: int, doorbells: Doorbells) -> None:
        self.session += 1
        self.ranks[i] = Rank(self.session, 10 * self.session)
        doorbells.begin(i, self.session, 10 * self.session)

    def control(self, i: int, kind: Kind) -> None:
        rank, rng = self.ranks[i], self.rng
        unread = [kind for kind, _ in rank.unread]
        # After an announcement a rank waits for the step; a leave is overwritten by it only.
        if rank.announced or Kind.STEP in unread or (unread and kind == Kind.LEAVE):
            return
        rank.controls += 1
        part = Part(i, rank.generation, rng.randint(1, 99), rng.randint(1, DEPTH),
                    rng.randint(0, 3), rng.getrandbits(32), rng.randint(0, 2**40))  # fmt: skip
        rank.unread.append((kind, part))
        names = ("rows", "depth", "moves", "receivers", "step")
        words = {name: getattr(part, name) for name in names}
        flag = make_flag(rank.session, rank.controls)
        self.post(self.slots.control_to_ffn(i), flag, kind=kind, **words)

    def request(self, i: int, mb: int) -> None:
        rank = self.ranks[i]
        if mb not in rank.waiting:
            rank.requests[mb] += 1
            rank.waiting.add(mb)
            flag = make_flag(rank.session, rank.requests[mb])
            self.post(self.slots.to_ffn(i, mb), flag, kind=Kind.DATA, depth=1)

    def read(self) -> set[int]:
        """Returns who has announced a step."""
        found = set()
        for i, rank in self.ranks.items():
            if rank.unread:
                kind, part = rank.unread[-1]
                rank.active = kind == Kind.STEP
                if rank.active:
                    rank.announced = part
                    found.add(i)
                rank.unread.clear()
        return found


@pytest.mark.parametrize("seed", range(4))
def test_random_messages_are_seen_as_a_plain_model_sees_them(seed: int) -> None:
    rng, slots = random.Random(seed), SlotMap(RANKS, 1, DEPTH)
    region = Region(slots.ffn_region_slots, 64, name="doorbells")
    doorbells, model = Doorbells(slots), Model(region, slots, rng)
    for _ in range(STEPS):
        i = rng.randrange(RANKS)
        act = rng.choice(("join", "end", "leave", *["announce"] * 3, "request", "take", "read",
                          "begin"))  # fmt: skip
        if act == "join":
            model.join(i, doorbells)
        elif act == "end":
            model.ranks.pop(i, None)
            doorbells.end(i)
        elif act == "read":
            announced = doorbells.read_controls(region)
            found = set() if announced is None else set(np.flatnonzero(announced).tolist())
            assert found == model.read()
        elif act == "begin":
            begun = [rank.announced for _, rank in sorted(model.ranks.items()) if rank.announced]
            assert list(doorbells.take_announced()) == begun
            for rank in model.ranks.values():
                rank.announced = None
        elif i in model.ranks:
            rank, mb = model.ranks[i], rng.randrange(DEPTH)
            if act == "request":
                model.request(i, mb)
            elif act == "take" and mb in rank.waiting:
                doorbells.requests[i, mb] += 1
                rank.waiting.discard(mb)
            elif act in ("leave", "announce"):
                model.control(i, Kind.LEAVE if act == "leave" else Kind.STEP)
        seen = {i: rank for i, rank in model.ranks.items()}
        assert np.flatnonzero(doorbells.joined).tolist() == sorted(seen)
        assert np.flatnonzero(doorbells.active).tolist() == sorted(
            i for i, rank in seen.items() if rank.active
        )
        announced_by = sorted(i for i, rank in seen.items() if rank.announced)
        assert np.flatnonzero(doorbells.announced).tolist() == announced_by
        assert doorbells.any_announced == bool(announced_by)
        assert doorbells.all_announced == (len(announced_by) == len(seen))
        asked = np.array([rng.random() < 0.7 for _ in range(RANKS)])
        waiting = sorted(i for i, rank in seen.items() if rank.waiting and asked[i])
        assert doorbells.requested(region, asked) == waiting
        new = [i for i, rank in seen.items() if rank.waiting or rank.unread]
        assert doorbells.wait(region, doorbells.joined, 0) == bool(new)
        for j, rank in seen.items():
            assert doorbells.has_control(region, j) == bool(rank.unread)
    model.link.close()
    region.close()


def test_announced_here_means_this_step_of_this_process() -> None:
    doorbells = Doorbells(SlotMap(3, 1, 1))
    for rank in range(3):
        doorbells.begin(rank, 1, 5)
        doorbells.parts["step"][rank] = 9
    doorbells.announced[:2] = True
    ordered = [Part(0, 5, 8, 1, 0, 0, 9), Part(1, 6, 8, 1, 0, 0, 9), Part(2, 5, 8, 1, 0, 0, 9)]
    assert doorbells.have_announced(Parts.of(ordered)).tolist() == [True, False, False]
    other_step = [Part(0, 5, 8, 1, 0, 0, 8)]
    assert doorbells.have_announced(Parts.of(other_step)).tolist() == [False]
    assert [p.attention for p in doorbells.take_announced(1)] == [1]
    assert doorbells.announced.tolist() == [True, False, False]


@pytest.mark.parametrize("seed", range(4))
def test_parts_in_an_array_are_those_of_a_list(seed: int) -> None:
    rng = random.Random(seed)
    most = 2**32 - 1
    parts = [
        Part(rng.randint(0, most), rng.randint(0, most), rng.choice((1, 7, most)),
             rng.choice((1, 3, most)), rng.randint(0, most), rng.choice((0, 1, 6, most)),
             rng.randint(0, 2**62))
        for _ in range(rng.randint(1, 70))
    ]  # fmt: skip
    table = Parts.of(parts)
    assert list(table) == parts and table[0] == parts[0] and list(table[1:3]) == parts[1:3]
    assert table.mix.shapes == {(part.rows, part.depth) for part in parts}
    taken = [rng.random() < 0.5 for _ in parts]
    kept = Parts.where(table.table, np.array(taken))
    assert list(kept) == [part for part, take in zip(parts, taken, strict=True) if take]
    assert kept.table.dtype == PARTS
    for instance in (0, 1, 2, 31):
        assert list(table.to(instance)) == [p for p in parts if gets(p.receivers, instance)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_steps_of_one_mix_share_it_and_their_rows(seed: int, tp: int) -> None:
    """The table that skips a step like the last one, against one that is filled anew."""
    rng = random.Random(seed)
    sizes = {"instances": RANKS, "max_depth": DEPTH, "most_rows": 40}
    place = {"device": torch.device("cpu"), "rank": tp - 1, "tp": tp}
    kept, everyone = RowTable(**sizes, **place), tuple(object() for _ in range(RANKS))
    doorbells = Doorbells(SlotMap(RANKS, 1, DEPTH))
    for rank in range(RANKS):
        doorbells.begin(rank, 1, 5)
    doorbells.parts["rows"], doorbells.parts["depth"] = 8, 1
    last, shared = None, 0
    for step in range(200):
        doorbells.parts["step"] = step
        changed = rng.choice(("", "", "rows", "depth", "receivers", "moves", "generation"))
        if changed:
            most = {"rows": 40, "depth": DEPTH}.get(changed, 3)
            doorbells.parts[changed][rng.randrange(RANKS)] = rng.randint(1, most)
        here = [rng.random() < 0.9 for _ in range(RANKS)] if rng.random() < 0.3 else [True] * RANKS
        doorbells.announced[:] = here
        parts = doorbells.take_announced()
        facts = [part._replace(step=0) for part in parts]
        assert last is None or (parts.mix is last[0]) == (facts == last[1])
        shared += last is not None and parts.mix is last[0]
        last = parts.mix, facts
        senders = everyone if all(here) and rng.random() < 0.8 else (None, *everyone)[: len(parts)]
        fresh = RowTable(**sizes, **place)
        kept.fill(parts, senders)
        fresh.fill(Parts(parts.table), senders)
        assert np.array_equal(kept.depths, fresh.depths)
        assert np.array_equal(kept.answers, fresh.answers)
        assert np.array_equal(kept.firsts, fresh.firsts)
        assert kept.rows_of_step() == fresh.rows_of_step()
        assert parts.mix.receivers == Parts(parts.table).mix.receivers
    assert 20 < shared < 180
