"""Parts of a layer of a step with prompts: against steps whose times are known."""

import pytest

from afd.metrics.step_trace import Span, StepTrace
from afd_bench.gpu.prefill_parts import between_us, parts_of, table
from afd_bench.gpu.timeline import Step

US = 1_000
LAYERS = 4


def step(depth, launch, send, experts, answer, wake, began_us=0):
    """A step of both sides on one clock: each side goes on ``wake`` after what it waits for.
    Times in microseconds; 100 pass before the layers, and 50 behind them."""
    mine, theirs = [], []
    here = there = 100
    back = [0] * depth
    for layer in range(LAYERS):
        for mb in range(depth):
            started = max(here, back[mb] + wake) if layer else here
            sent = here = started + launch + send
            mine.append((layer, mb, started, started + launch, sent))
            started = max(there, sent + wake)
            back[mb] = there = started + experts + answer
            theirs.append((layer, mb, started, started + experts, there))

    def trace(rows, ended):
        spans = tuple(
            Span(layer, mb, 8, *((at + began_us) * US for at in times))
            for layer, mb, *times in rows
        )
        return StepTrace(began_us * US, (ended + began_us) * US, False, spans)

    end = max(back) + 50
    return Step(trace(mine, end), {"ffn-0": trace(theirs, end)}, {}, {})


def test_at_depth_1_a_layer_is_the_sum_of_its_parts():
    found = parts_of(step(1, 30, 20, 40, 10, 5))
    assert (found.launch, found.send, found.experts, found.answer) == (30, 20, 40, 10)
    assert (found.request_seen, found.answer_seen) == (5, 5)
    assert found.attention_waits == 40 + 10 + 2 * 5 and found.ffn_waits == 30 + 20 + 2 * 5
    assert found.layer == 110
    assert found.outside == pytest.approx(100 + 50 - 5)  # nothing wakes up behind the last answer


def test_with_more_micro_batches_the_slower_side_hardly_waits():
    found = parts_of(step(3, 10, 5, 60, 20, 5))
    assert (found.experts, found.answer, found.layer) == (180, 60, 240)
    assert found.ffn_waits == found.request_seen == 0  # the next request is here before the answer
    assert found.launch + found.send + found.attention_waits == pytest.approx(240, rel=0.01)
    assert found.answer_seen == 3 * 5


def test_time_between_steps_leaves_idle_time_out():
    times = (1, 30, 20, 40, 10, 5)
    first = step(*times)
    end = first.attention.ended_ns // US
    steps = [first, step(*times, began_us=end + 70), step(*times, began_us=end + 10_000_000)]
    assert between_us(steps) == 70 and between_us([first]) == 0
    assert "launch" in table(steps) and "30 us" in table(steps)
