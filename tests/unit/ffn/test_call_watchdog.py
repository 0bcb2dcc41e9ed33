"""Hung expert calls: which calls the watch reports, and which it does not."""

import threading
import time

import pytest
from remote_support import Deployed, in_background, reference_model, run_step

from ffn_worker.call_watchdog import CallClock, HungCallWatch

LIMIT_S, FIRST_S = 20.0, 180.0


class Watched:
    """A watch with a simulated clock; it checks once per second."""

    def __init__(self) -> None:
        self.calls = CallClock()
        self.now = 1000.0
        self._watch = HungCallWatch(self.calls, limit_s=LIMIT_S, first_limit_s=FIRST_S)

    def after(self, seconds: float) -> tuple[float, str] | None:
        """Returns (seconds, sentence) of a report within ``seconds``; None if there was none."""
        began = self.now
        while self.now < began + seconds:
            self.now += 1.0
            if (sentence := self._watch.check(self.now)) is not None:
                return self.now - began, sentence
        return None

    def call(self, layer: int, rows: int, seconds: float = 0.0) -> tuple[float, str] | None:
        self.calls.begin(layer, rows)
        found = self.after(seconds)
        self.calls.end()
        return found


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_hung_call_is_reported(watched):
    watched.call(3, 32)
    at, sentence = watched.call(3, 17, 60.0)
    assert LIMIT_S < at <= LIMIT_S + 3
    assert "an expert call has hung for 21 s (layer 3, 17 rows)" in sentence
    assert "deadlines.stuck_s" in sentence


def test_many_calls_and_long_waits_between_them_are_not_reported(watched):
    watched.call(1, 8)
    for _ in range(40):
        assert watched.call(1, 8, LIMIT_S - 1) is None
        assert watched.after(3 * LIMIT_S) is None  # no work, or a late sender


@pytest.mark.parametrize(("layer", "rows"), [(2, 8), (1, 9), (1, 16)])
def test_a_call_that_may_compile_has_a_longer_limit(watched, layer, rows):
    watched.call(1, 8)
    assert watched.call(layer, rows, FIRST_S - 2) is None
    assert watched.call(layer, rows, FIRST_S) is not None  # compiled by now
    at, _ = watched.call(layer, 2 * rows, 2 * FIRST_S)
    assert at > FIRST_S


def test_a_process_that_was_stopped_in_a_call_is_not_reported(watched):
    watched.call(1, 8)
    watched.calls.begin(1, 8)
    assert watched.after(LIMIT_S - 5) is None
    watched.now += 600
    assert watched.after(4) is None
    assert watched.after(10) is not None


def test_the_loop_is_reported_only_inside_the_experts(tiny_models, monkeypatch):
    """The watch reports a real loop on a thread while it hangs, not while it is fast or idle."""
    monkeypatch.setattr("ffn_worker.call_watchdog._CHECK_EVERY_S", 0.02)
    checkpoint = tiny_models("qwen3_moe")
    deployed, reference = Deployed(checkpoint, 1, 1), reference_model(checkpoint)
    loop, client = deployed.loops[0], deployed.clients[0]
    blamed: list[str] = []
    hung, go_on = threading.Event(), threading.Event()
    try:
        run_step(client, deployed.resolved, reference, [4], 0)
        HungCallWatch(loop.clock, limit_s=0.3, first_limit_s=0.3).start(blamed.append)
        run_step(client, deployed.resolved, reference, [4], 1, pause=0.1)
        time.sleep(0.5)  # idle
        assert not blamed and loop.clock.current is None
        forward = loop.rank.model.forward

        def hang(*args):
            hung.set()
            assert go_on.wait(10)
            return forward(*args)

        monkeypatch.setattr(loop.rank.model, "forward", hang)
        step, raised = in_background(run_step, client, deployed.resolved, reference, [4], 2)
        step.start()
        assert hung.wait(5)
        end = time.monotonic() + 5
        while not blamed and time.monotonic() < end:
            time.sleep(0.02)
        go_on.set()
        step.join(10)
        assert len(blamed) == 1 and ", 4 rows)" in blamed[0]
        assert not raised
    finally:
        go_on.set()
        deployed.close()
