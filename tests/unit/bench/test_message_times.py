"""Stage times from message timestamps: a simulated timeline must give its stage times back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_bench.message_times import Times, exchanges, rows_of, steps_of, times_of
from afd_bench.stage_points import Decode, Observed, points
from afd_planner.cost.measured import FORMAT, parse_measured
from afd_planner.simulate.step import StepInput, run_step

REST_NS = 3_000_000
ROWS = (5, 6, 8)  # of the micro-batches


def made_up(seed: int, x: int, y: int, depth: int, layers: int = 4, steps: int = 5):
    """Pages of the roles, and the stage times in ns: attention [steps, L, d, x], ffn [.., y]."""
    random = np.random.default_rng(seed)
    shape = (steps, layers, depth)
    attention = random.integers(100_000, 900_000, (*shape, x)).astype(float)
    attention[:, 0, 0] = attention[:, 1:, 0].mean(axis=1).round()  # what the first one is taken for
    ffn = random.integers(100_000, 900_000, (*shape, y)).astype(float)
    wire = 4000.0
    pages = {f"ffn-{j}": {f"attention-{i}": [] for i in range(x)} for j in range(y)}
    pages |= {f"attention-{i}": {f"ffn-{j}": [] for j in range(y)} for i in range(x)}
    start, ffn_from = np.full(x, 1e9), -np.inf
    none, both = np.zeros((depth, x)), (layers, depth)
    for step in range(steps):
        given = StepInput(
            start=start,
            rows=np.tile(np.array(ROWS[:depth])[:, None], (1, x)),
            attention=attention[step],
            ffn=ffn[step],
            out_burst=np.zeros((*both, x)),
            out_each=none,
            back_burst=np.zeros((*both, y)),
            back_each=none,
            out_latency=np.full((*both, x), wire),
            back_latency=np.full((*both, y), wire),
            ffn_from=ffn_from,
        )
        done = run_step(given, spans=True)
        assert done.spans is not None
        for layer in range(layers):
            for mb in range(depth):
                about = (layer, mb, ROWS[mb], 64 * ROWS[mb])
                for i in range(x):
                    for j in range(y):
                        posted = done.spans.attention[1, layer, mb, i]
                        answered = done.spans.ffn[1, layer, mb, j]
                        pages[f"ffn-{j}"][f"attention-{i}"].append(event(posted, wire, about))
                        pages[f"attention-{i}"][f"ffn-{j}"].append(event(answered, wire, about))
        start, ffn_from = done.end + REST_NS, done.ffn_end
    return pages, attention, ffn


def event(posted: float, wire: float, about: tuple[int, int, int, int]):
    arrived = posted + wire
    return tuple(map(round, (posted, posted, arrived, arrived))) + about


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3))
def test_the_simulators_timeline_gives_its_stage_times_back(seed, x, y, depth):
    pages, attention, ffn = made_up(seed, x, y, depth)
    times = times_of(pages, 0, 1 << 60, rows=sum(ROWS[:depth]))
    for mb, rows in enumerate(ROWS[:depth]):
        first = 0 if mb else 1  # a step's first pair belongs to the time between steps
        wanted = attention[:, first:, mb].ravel() / 1e3
        assert sorted(times.attention[rows]) == pytest.approx(sorted(wanted), abs=0.01)
        seen = np.ones(ffn[:, :, mb].shape, bool)
        seen[0, 0] = mb > 0  # nothing is known from before the first call
        wanted = ffn[:, :, mb][seen] / 1e3
        assert sorted(times.ffn[rows * x]) == pytest.approx(sorted(wanted), abs=0.01)
    step_rows = sum(ROWS[:depth])
    assert set(times.rest) == {step_rows}
    assert times.rest[step_rows] == pytest.approx([REST_NS / 1e3] * 4 * x, abs=0.01)
    assert {round(us, 3) for some in times.wire.values() for us in some} == {4.0}


def test_steps_that_are_not_whole_or_not_asked_for_do_not_count():
    pages, _, _ = made_up(1, 1, 1, 3)
    whole = times_of(pages, 0, 1 << 60)
    asked, answers = pages["ffn-0"]["attention-0"], pages["attention-0"]["ffn-0"]
    leave = (1, 1, 2, 2, -1, -1, 0, 0)
    torn = {
        "ffn-0": {"attention-0": [leave, *asked[3:]]},  # as a ring that has lost its oldest
        "attention-0": {"ffn-0": answers[5:]},
    }
    fewer = times_of(torn, 0, 1 << 60)
    assert sum(map(len, whole.attention.values())) == 5 * 11
    assert sum(map(len, fewer.attention.values())) == 4 * 11
    assert len(fewer.rest[19]) == 3
    assert times_of(pages, 0, 1 << 60, rows=18) == Times()
    assert times_of(pages, 0, 1) == Times()
    begin = asked[12][0]  # the second step's first post
    assert sum(map(len, times_of(pages, begin, begin + 1).attention.values())) == 11


def test_steps_are_told_apart_by_the_instances_in_them():
    both, _, _ = made_up(3, 2, 2, 2)
    one, _, _ = made_up(4, 1, 2, 2, steps=3)
    later = 10**12
    for ffn in ("ffn-0", "ffn-1"):
        moved = [(*(at + later for at in e[:4]), *e[4:]) for e in one[ffn]["attention-0"]]
        both[ffn]["attention-0"] += moved
        moved = [(*(at + later for at in e[:4]), *e[4:]) for e in one["attention-0"][ffn]]
        both["attention-0"][ffn] += moved

    def counts(active: int | None) -> list[int]:
        found = times_of(both, 0, 1 << 60, active=active)
        return [sum(map(len, some.values())) for some in (found.attention, found.ffn, found.rest)]

    assert counts(1)[0] == 3 * 7 and counts(2)[0] == 2 * 5 * 7
    assert counts(1)[0] + counts(2)[0] == counts(None)[0]
    assert set(times_of(both, 0, 1 << 60, active=1).ffn) == set(ROWS[:2])
    assert set(times_of(both, 0, 1 << 60, active=2).ffn) == {2 * rows for rows in ROWS[:2]}


def test_rows_of_a_step_are_those_of_its_micro_batches():
    pages, _, _ = made_up(2, 1, 2, 3)
    copies = [
        exchanges(pages[f"ffn-{j}"]["attention-0"], pages["attention-0"][f"ffn-{j}"])
        for j in range(2)
    ]
    steps = steps_of(copies)
    assert len(steps) == 5 and {rows_of(step) for step in steps} == {19}


def test_windows_become_points_that_load():
    def window(us: float) -> Times:
        return Times({4: [us, us + 2]}, {8: [2 * us]}, {4: [5 * us]}, {512: [3.0], 520: [5.0]})

    prefill = Times({300: [900.0], 310: [920.0]}, {300: [1000.0]}, {}, {})
    turns = [Observed([[Decode(50.0, window(us))]], [prefill]) for us in (100.0, 110.0, 400.0)]
    table = points(turns)
    t = parse_measured({"format": FORMAT, **table}, "file")
    assert t.t_attention(4, 50).seconds == pytest.approx(111e-6)  # the median turn's mean
    assert t.t_attention(4, 50).source == "measured"
    assert t.t_rest(4).seconds == pytest.approx(550e-6)
    assert t.t_ffn(8).seconds == pytest.approx(220e-6)
    assert [point["bytes"] for point in table["wire"]] == [516]  # both directions
    assert table["prefill"] == [{"rows": 305, "us": 910.0}]
