"""An FFN loop that hangs in an expert call: who is blamed, and who is not."""

import threading
import time

import pytest
from remote_support import Deployed, in_background, reference_model, run_step

from ffn_worker.stuck import CallClock, CallWatch

STUCK_S, FIRST_S = 20.0, 180.0


class Watched:
    """A watch with a clock of its own; looks every second."""

    def __init__(self) -> None:
        self.calls = CallClock()
        self.now = 1000.0
        self._watch = CallWatch(self.calls, stuck_s=STUCK_S, first_s=FIRST_S)

    def after(self, seconds: float) -> tuple[float, str] | None:
        """When in this time a call was blamed, and the sentence."""
        began = self.now
        while self.now < began + seconds:
            self.now += 1.0
            if (sentence := self._watch.look(self.now)) is not None:
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


def test_a_call_that_does_not_end_is_blamed(watched):
    watched.call(3, 32)
    at, sentence = watched.call(3, 17, 60.0)
    assert STUCK_S < at <= STUCK_S + 3
    assert "stuck for 21 s in the experts of layer 3 over 17 rows" in sentence
    assert "deadlines.stuck_s" in sentence


def test_many_calls_and_long_waits_between_them_are_no_wedge(watched):
    watched.call(1, 8)
    for _ in range(40):
        assert watched.call(1, 8, STUCK_S - 1) is None
        assert watched.after(3 * STUCK_S) is None  # nothing to do, or a sender is late


@pytest.mark.parametrize(("layer", "rows"), [(2, 8), (1, 9), (1, 16)])
def test_a_call_that_may_compile_gets_longer(watched, layer, rows):
    watched.call(1, 8)
    assert watched.call(layer, rows, FIRST_S - 2) is None
    assert watched.call(layer, rows, FIRST_S) is not None  # compiled by now
    at, _ = watched.call(layer, 2 * rows, 2 * FIRST_S)
    assert at > FIRST_S


def test_a_process_that_was_stopped_in_a_call_is_not_blamed(watched):
    watched.call(1, 8)
    watched.calls.begin(1, 8)
    assert watched.after(STUCK_S - 5) is None
    watched.now += 600
    assert watched.after(4) is None
    assert watched.after(10) is not None


def test_the_loop_is_blamed_inside_of_the_experts_only(tiny_models, monkeypatch):
    """A real loop on a thread: quick and idle, it is not blamed; hanging, it is."""
    monkeypatch.setattr("ffn_worker.stuck._LOOK_S", 0.02)
    checkpoint = tiny_models("qwen3_moe")
    deployed, reference = Deployed(checkpoint, 1, 1), reference_model(checkpoint)
    loop, client = deployed.loops[0], deployed.clients[0]
    blamed: list[str] = []
    hung, go_on = threading.Event(), threading.Event()
    try:
        run_step(client, deployed.resolved, reference, [4], 0)
        CallWatch(loop.clock, stuck_s=0.3, first_s=0.3).start(blamed.append)
        run_step(client, deployed.resolved, reference, [4], 1, pause=0.1)
        time.sleep(0.5)  # idle
        assert not blamed and loop.clock.current is None
        forward = loop._model.forward

        def hang(*args):
            hung.set()
            assert go_on.wait(10)
            return forward(*args)

        monkeypatch.setattr(loop._model, "forward", hang)
        step, raised = in_background(run_step, client, deployed.resolved, reference, [4], 2)
        step.start()
        assert hung.wait(5)
        end = time.monotonic() + 5
        while not blamed and time.monotonic() < end:
            time.sleep(0.02)
        go_on.set()
        step.join(10)
        assert len(blamed) == 1 and "over 4 rows" in blamed[0]
        assert not raised
    finally:
        go_on.set()
        deployed.close()
