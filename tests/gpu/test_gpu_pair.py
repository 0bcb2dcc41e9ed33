"""Transport, graphs and recovery of 1A1F on one GPU; the attention side is a stub."""

import ctypes
import signal
import time

import pytest
import torch
from gpu_pair import KIND, Graph, Pair, Step

from afd.metrics.step_trace import StepTimestamps
from afd_bench import stand_in_nic
from afd_comm import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BF16, FP8 = 2e-2, 6e-2


@pytest.fixture(params=["exact", "fp8"])
def wire(request):
    return request.param


@pytest.fixture
def make_pair(tiny_models, tmp_path):
    made = []

    def make(**sections):
        made.append(Pair(tiny_models("qwen3_moe"), tmp_path, **sections))
        return made[-1]

    yield make
    for pair in made:
        print(pair.log("ffn")[-3000:])
        pair.close()


def test_host_and_graph_steps_match_one_gpu(make_pair, wire):
    pair = make_pair(wire={"format": wire})
    model = pair.reference()
    limit = BF16 if wire == "exact" else FP8
    for depth in (1, 2, 3):
        step = Step(pair, 3 * depth + 8, depth, seed=depth)
        step.run(pair.host)
        assert step.error(model) < limit
        graph = Graph(step)
        graph.capture()
        for seed in range(20):
            step.fill(100 + seed)
            step.out.zero_()
            assert set(graph.replay()) == {Status.OK}
            assert step.error(model) < limit
        step.pad(2 * depth + 7)
        assert set(graph.replay()) == {Status.OK}
        assert step.error(model) < limit
        assert (step.out[step.real :] == 0).all()  # no expert computed the padding rows
    pair.host.leave()


def test_graph_steps_over_verbs_go_from_gpu_memory_to_gpu_memory(make_pair, tmp_path):
    """NICs without hardware read and write registered GPU memory. One port is lost between the
    tickets of a replayed step and its end, then the FFN instance is killed inside one."""
    library = str(stand_in_nic.build(tmp_path))
    ports = {"ports": ["fake0", "fake1"], "library": library}
    pair = make_pair(transport={"backend": "verbs", "verbs": ports})
    model, nic = pair.reference(), ctypes.CDLL(library)
    (link,) = [peer.link for peer in pair.host.peers]
    assert link.backend == "verbs" and link.notes == "", "nothing is staged"
    for depth in (1, 2, 3):
        step = Step(pair, 3 * depth + 8, depth, seed=depth)
        graph = Graph(step)
        graph.capture()
        for seed in range(20):
            if (depth, seed) == (3, 10):
                nic.fake_lose_acks(b"fake0", 1)
            step.fill(100 + seed)
            assert set(graph.replay()) == {Status.OK}
            assert step.error(model) < BF16
    assert "fake0" in link.notes
    nic.fake_lose_acks(b"fake0", 0)
    killed_in_a_replay(pair)


def test_graph_steps_over_tcp_are_staged(make_pair):
    """As between hosts without RDMA: the proxy copies messages through host memory."""
    pair = make_pair(transport={"backend": "tcp"})
    model = pair.reference()
    (link,) = [peer.link for peer in pair.host.peers]
    assert link.backend == "tcp" and "through host memory" in link.notes
    for depth in (1, 3):
        step = Step(pair, 3 * depth + 8, depth, seed=depth)
        graph = Graph(step)
        graph.capture()
        for seed in range(5):
            step.fill(100 + seed)
            assert set(graph.replay()) == {Status.OK}
            assert step.error(model) < BF16
    pair.host.leave()


def test_ffn_instances_on_cpus(make_pair):
    """A mixed pool: the host sends the steps."""
    pair = make_pair(ffn={"device": "cpu"})
    model = pair.reference()
    for depth in (1, 3):
        step = Step(pair, 3 * depth + 8, depth, seed=depth)
        step.run(pair.host)
        assert step.error(model) < BF16
    pair.host.leave()


@pytest.mark.skipif(KIND == "rocm", reason="torch for ROCm takes no stamps in graphs")
@pytest.mark.parametrize("depth", [1, 3])
def test_timestamps_of_a_captured_step_are_read_after_each_replay(make_pair, depth):
    pair = make_pair(metrics={"stage_every": 1})
    step = Step(pair, 24, depth)
    graph = Graph(step)
    graph.timestamps = StepTimestamps(pair.streams)
    graph.capture()
    model = pair.reference()
    for seed in range(3):
        step.fill(seed)
        began = time.monotonic_ns()
        assert set(graph.replay()) == {Status.OK}
        assert step.error(model) < BF16
        trace = graph.timestamps.read(began, replayed=True)
        assert (trace.depth, trace.rows, len(trace.spans)) == (depth, 24, len(step.layers) * depth)
        times = [t for s in trace.spans for t in (s.started_ns, s.done_ns)]
        assert times == sorted(times) and began <= times[0]
        assert all(s.done_ns < s.copied_ns <= trace.ended_ns for s in trace.spans)


def test_a_killed_ffn_releases_the_stream_and_the_step_can_be_repeated(make_pair):
    killed_in_a_replay(make_pair())


def killed_in_a_replay(pair):
    model = pair.reference()
    step = Step(pair, 24, 3)
    graph = Graph(step)
    graph.capture()
    assert set(graph.replay()) == {Status.OK}
    # The FFN instance is stopped before the replay, so the step cannot complete.
    pair.signal("ffn", signal.SIGSTOP)
    pair.host.begin_step(3)
    pair.host.announce(24)
    graph.launch()
    guard = pair.region.guard(pair.streams.compute, graph.waits.slots, graph.waits.flags)
    time.sleep(0.2)
    assert not guard.done
    pair.signal("ffn", signal.SIGKILL)
    started = time.monotonic()
    assert Status.PEER_GONE in guard.wait(30_000_000)
    assert time.monotonic() - started < 2.0
    pair.processes["ffn"].wait(10)
    pair.start("ffn")
    pair.host.reconnect([0])
    graph = Graph(step)
    graph.capture()
    assert set(graph.replay()) == {Status.OK}
    assert step.error(model) < BF16


def test_a_wedged_ffn_releases_the_stream_at_the_deadline(make_pair):
    pair = make_pair()
    graph = Graph(Step(pair, 24, 2))
    graph.capture()
    assert set(graph.replay()) == {Status.OK}
    pair.signal("ffn", signal.SIGSTOP)
    started = time.monotonic()
    assert Status.DEADLINE in graph.replay(timeout_s=1.0)
    assert 1.0 <= time.monotonic() - started < 3.0
    torch.cuda.synchronize()
