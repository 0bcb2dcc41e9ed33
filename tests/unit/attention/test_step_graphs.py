"""When StepGraphs captures, replays, repeats a step or fails; vLLM and CUDA are faked."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from afd.errors import DeadlineExceeded, PeerLost
from afd.metrics.role import RoleMetrics, Stage
from afd.wire.streams_torch import CudaTimer, HostStreams
from afd_comm import Status
from attention_worker.remote import replay_guard
from attention_worker.remote.observer import ReplayObserver
from attention_worker.remote.replay_guard import ReplayGuard, ReplaySettings
from attention_worker.remote.sessions import run_alone
from attention_worker.remote.stream import Waits
from attention_worker.vllm_hooks import graphs

OK, GONE, LATE = Status.OK, Status.PEER_GONE, Status.DEADLINE


@dataclass(frozen=True)
class Wire:
    backend: str = "ipc"
    sends_alone: bool = True


@dataclass(frozen=True)
class Peer:
    id: str
    rank: int
    session: int
    link: Wire = Wire()


class Host:
    """A stand-in for RemoteExperts."""

    def __init__(self, log):
        self.peers = self.links = (Peer("ffn-0", 0, 1), Peer("ffn-1", 1, 2))
        self.log = log

    def begin_step(self, depth):
        self.log.append(("begin", depth))

    def announce(self, rows):
        self.log.append(("announce", rows))

    def reconnect(self, lost):
        if lost:
            self.log.append(("reconnect", tuple(lost)))
            self.peers = tuple(
                replace(p, session=p.session + 10) if p.rank in lost else p for p in self.peers
            )

    def end_replay(self, rows_sent):
        assert rows_sent == 7
        self.log.append(("end",))


class Stream:
    streams = HostStreams()
    rows_sent = 7

    def record(self, peers, timestamps):
        timestamps.begin()
        timestamps.done(0, 0, 24)
        timestamps.copied()
        timestamps.end()
        return Waits([0, 1, 0, 1], [1, 1, 2, 2])


class Hold:
    def __init__(self, device):
        assert device == "cpu"
        self.closed = False

    def open(self):
        self.closed = False


class Region:
    """Its guards return the statuses in ``script``, then OK. Bad ones close the hold.

    holds: of the steps so far; None: nothing stops the stream behind a step.
    """

    device = "cpu"

    def __init__(self):
        self.script = []
        self.holds = []
        self.finished = threading.Event()  # the stream has finished
        self.finished.set()

    def guard(self, stream, slots, flags, hold):
        statuses = self.script.pop(0) if self.script else [OK] * len(slots)
        self.holds.append(hold)

        def wait(timeout_us):
            assert self.finished.wait(5)
            if hold is not None:
                hold.closed = statuses != [OK] * len(slots)
            return statuses

        return SimpleNamespace(wait=wait)


class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, other):
        return 2.0


@pytest.fixture
def made(monkeypatch):
    return make(monkeypatch, lookahead=False)


@pytest.fixture
def ahead(monkeypatch):
    return make(monkeypatch, lookahead=True)


def make(monkeypatch, lookahead):
    log = []

    class Model:
        """Its output names the step that it was run for."""

        remote = None

        def __call__(self, x):
            log.append(("eager", contexts[-1].step, threading.current_thread().name))
            assert len(log) < 50 and not torch.is_grad_enabled()
            return x + 1

    model, contexts, outputs = Model(), [], {}

    def init(self, runnable, config, runtime_mode):
        self.runnable, self.runtime_mode = runnable, runtime_mode
        self.concrete_cudagraph_entries = {}

    def call(self, *args, **kwargs):
        key = made.context.batch_descriptor
        first = key not in self.concrete_cudagraph_entries
        self.concrete_cudagraph_entries[key] = object()
        log.append(("capture" if first else "replay", type(model.remote).__name__))
        return outputs.setdefault(key, torch.zeros(2))

    @contextmanager
    def override(context):
        contexts.append(context)
        yield
        contexts.pop()

    monkeypatch.setattr(CUDAGraphWrapper, "__init__", init)
    monkeypatch.setattr(CUDAGraphWrapper, "__call__", call)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pools = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(graphs, "set_cudagraph_capturing_enabled", lambda on: None)
    context = SimpleNamespace(
        cudagraph_runtime_mode=CUDAGraphMode.FULL,
        batch_descriptor=BatchDescriptor(24),
        ubatch_slices=None,
        step=1,
    )
    made = SimpleNamespace(context=context)
    monkeypatch.setattr(graphs, "get_forward_context", lambda: made.context)
    monkeypatch.setattr(graphs, "override_forward_context", override)
    monkeypatch.setattr(replay_guard, "Hold", Hold)
    host, region, metrics = Host(log), Region(), RoleMetrics("attention")
    model.remote = host
    guard = ReplayGuard(
        ReplaySettings(deadline_s=1.0, lookahead=lookahead),
        host,
        region,
        Stream.streams,
        ReplayObserver(metrics, 2, CudaTimer()),
        lambda: None,
    )
    step = graphs.StepGraphs(model, None, host, Stream(), guard)
    made.__dict__.update(
        step=lambda: step(torch.zeros(2)),
        graphs=step,
        guard=guard,
        log=log,
        host=host,
        region=region,
        metrics=metrics,
    )
    return made


def test_a_shape_is_captured_once_and_replayed_each_time(made):
    assert made.step() is made.step()
    run = [("announce", 24), ("replay", "Host"), ("end",)]
    assert made.log == [("begin", 1), ("capture", "Stream"), *run, ("begin", 1), *run]
    assert made.metrics.graph_steps[1] == 2
    assert made.metrics.graph_seconds[1] == pytest.approx(0.004)


def test_each_depth_of_a_shape_has_its_own_graph(made):
    made.step()
    made.context.ubatch_slices = [None, None]
    made.step()
    made.context.ubatch_slices = None
    made.step()
    assert [entry[0] for entry in made.log].count("capture") == 2
    assert made.metrics.graph_steps[:3] == [0, 2, 1]


def test_after_an_ffn_death_the_step_runs_again_without_a_graph(made):
    made.step()
    made.log.clear()
    made.region.script = [[OK, GONE, OK, GONE]]
    pool = made.graphs.graph_pool
    assert made.step().tolist() == [1, 1]  # in the memory of the graph
    repeated = [("reconnect", (1,)), ("begin", 1), ("eager", 1, "guard_0")]
    assert made.log == [("begin", 1), ("announce", 24), ("replay", "Host"), *repeated]
    assert made.metrics.graph_steps[1] == 1
    made.log.clear()
    made.step()
    assert made.log[:2] == [("begin", 1), ("capture", "Stream")]
    assert made.graphs.graph_pool != pool  # a pool whose graphs were deleted is not reused


def test_stage_timestamps_of_every_second_step_are_read(made):
    for _ in range(5):
        made.step()
    kept = made.metrics.step_traces.all()
    assert [(step.replayed, step.rows) for step in kept] == [(True, 24)] * 2
    assert made.metrics.stage(Stage.ATTENTION).snapshot().count == 2


def test_a_late_ffn_is_an_error_that_names_it(made):
    made.region.script = [[LATE, OK, LATE, OK]]
    with pytest.raises(DeadlineExceeded, match=r"ffn-0 did not answer a step within 1 s"):
        made.step()


def test_steps_of_other_modes_run_the_model_eagerly(made):
    made.context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    made.graphs.runnable = lambda x: ("eager", x)
    assert made.graphs(3) == ("eager", 3)
    assert made.log == []


def test_with_lookahead_the_host_continues_and_the_next_step_waits(ahead):
    ahead.region.finished.clear()
    ahead.step()
    first = ahead.guard.running
    assert ahead.metrics.graph_steps[1] == 0
    ahead.log.clear()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ahead.step)
        with pytest.raises(TimeoutError):
            second.result(0.1)
        assert ahead.log == []  # not announced before the first step has finished
        ahead.region.finished.set()
        second.result(5)
    assert first.done() and ahead.guard.running is not first
    ahead.guard.wait_for_step()
    assert ahead.metrics.graph_steps[1] == 2


def test_with_lookahead_a_lost_step_runs_again_before_its_tokens_are_given(ahead):
    gpu = pytest.importorskip("attention_worker.vllm_hooks.gpu_runner")
    ahead.region.script = [[OK, GONE, OK, GONE]]
    ahead.region.finished.clear()
    hidden = ahead.step()
    tokens = SimpleNamespace(get_output=lambda: hidden.tolist())
    output = gpu.GuardedOutput(ahead.guard.running, tokens)
    ahead.context = SimpleNamespace(**{**vars(ahead.context), "step": 2})  # of the next step
    ahead.region.finished.set()
    assert output.get_output() == [1, 1]
    assert ahead.log[-3:] == [("reconnect", (1,)), ("begin", 1), ("eager", 1, "guard_0")]
    ahead.guard.wait_for_step()


def test_with_lookahead_a_late_step_gives_no_token(ahead):
    gpu = pytest.importorskip("attention_worker.vllm_hooks.gpu_runner")
    ahead.region.script = [[LATE, OK, LATE, OK]]
    ahead.step()
    tokens = SimpleNamespace(get_output=lambda: "tokens")
    output = gpu.GuardedOutput(ahead.guard.running, tokens)
    said = "ffn-0 did not answer a step within 1 s"
    with pytest.raises(DeadlineExceeded, match=said):
        output.get_output()
    with pytest.raises(DeadlineExceeded, match=said):
        ahead.step()


def test_a_step_that_cannot_run_again_in_time_ends_the_engine(ahead, monkeypatch):
    """A call of the driver waits for the device, which is held."""
    monkeypatch.setattr(replay_guard, "_LIMIT", 0.1)
    ahead.region.script = [[OK, GONE, OK, GONE]]
    opened = threading.Event()
    hold = ahead.guard._hold
    monkeypatch.setattr(hold, "open", lambda: (setattr(hold, "closed", False), opened.set()))
    ahead.host.reconnect = lambda lost: opened.wait(5)
    ahead.step()
    with pytest.raises(PeerLost, match=r"ffn-1 died was not run again within 0\.1 s"):
        ahead.guard.wait_for_step()


def test_with_lookahead_a_good_step_gives_its_tokens(ahead):
    gpu = pytest.importorskip("attention_worker.vllm_hooks.gpu_runner")
    ahead.step()
    tokens = SimpleNamespace(get_output=lambda: "tokens")
    assert gpu.GuardedOutput(ahead.guard.running, tokens).get_output() == "tokens"


def test_with_lookahead_a_step_whose_messages_need_the_driver_is_waited_for(ahead):
    ahead.host.peers = tuple(replace(peer, link=Wire("tcp")) for peer in ahead.host.peers)
    ahead.step()
    assert ahead.guard.running is None and ("end",) in ahead.log
    assert ahead.region.holds == [None]  # a driver's call of the recovery would wait for it


@pytest.mark.parametrize("backend", ["ipc", "verbs", "tcp"])
@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_messages_run_alone_over_ipc_and_where_nics_reach_gpu_memory(backend, sends, writes):
    link, region = Wire(backend, sends), SimpleNamespace(nics_write_alone=writes)
    alone = backend == "ipc" or (backend == "verbs" and sends and writes)
    assert run_alone(region, [Peer("ffn-0", 0, 1), Peer("ffn-1", 1, 2, link)]) == alone
