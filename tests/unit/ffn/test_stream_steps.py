"""Stream steps: StreamExperts against StreamSteps.

They run on the reference accelerator of afd_comm, where a stream is the calling thread. The same
calls run on a GPU inside a graph capture. Every answer is compared with the reference experts.
"""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from remote_support import DEPTH, deploying, random_rows, reference_model, run_step

from afd.metrics.role import Stage
from afd.metrics.step_trace import NoTimestamps, StepTimestamps
from afd.schedule import split_rows
from afd.wire.streams_torch import HostStreams
from afd_comm import Status
from attention_worker.remote.replay_guard import failed_peers
from attention_worker.remote.stream import StreamExperts
from attention_worker.vllm_hooks.padding import padding_of

NO_TIMESTAMPS = NoTimestamps()


@pytest.fixture
def deploy(tiny_models):
    with deploying() as start:

        def make(family, x, y, **sections):
            sections = {"transport": {"backend": "ipc"}, **sections}
            return start(tiny_models(family), x, y, **sections)

        yield make


def stream_of(deployed, i):
    client = deployed.clients[i]
    return StreamExperts(deployed.resolved, i, client._region, HostStreams(), client.expert_slots)


def run_on_streams(
    client, stream, resolved, reference, rows, depth, seed, timestamps=NO_TIMESTAMPS, real=None
):
    """Does what a replayed graph does: the host announces the step, the streams do the rest.

    real: number of rows that belong to requests, the others are padding; None: no padding.
    """
    client.begin_step(depth)
    waits = stream.record(client.peers, timestamps)
    client.announce(rows)
    stream.begin_step(depth)
    sent = {}

    def check(mb):
        layer, x, ids, weights, kept = sent.pop(mb)
        expected = reference.forward(layer, x, ids, weights)[:kept]
        torch.testing.assert_close(stream.recv(mb)[:kept], expected, rtol=1e-5, atol=1e-5)

    slots = torch.arange(rows)
    slots[rows if real is None else real :] = -1  # as vLLM marks them
    parts = slots.split(split_rows(rows, depth))
    for layer in resolved.model.moe_layers:
        for mb, part in enumerate(split_rows(rows, depth)):
            if mb in sent:
                check(mb)
            x, ids, weights = random_rows(resolved, part, hash((seed, layer, mb)) % 2**31)
            padding = padding_of({"a": parts[mb], "b": parts[mb]})
            with stream.sending(layer, mb, part):
                stream.send(layer, mb, x, ids.masked_fill(padding, -1), weights)
            sent[mb] = (layer, x, ids, weights, part - int(padding.sum()))
    for mb in list(sent):
        check(mb)
    stream.end_step()
    client.end_replay(stream.rows_sent)
    return waits


@pytest.mark.parametrize("x,y", [(1, 1), (2, 1), (1, 2), (1, 3)])
def test_alternating_stream_and_host_steps_match_the_reference(deploy, tiny_models, x, y):
    deployed = deploy("deepseek_v3", x, y)
    expected = reference_model(tiny_models("deepseek_v3"))
    errors = []

    def work(i):
        client, stream = deployed.clients[i], stream_of(deployed, i)
        try:
            for step in range(8):
                depth = 1 + (step + i) % DEPTH
                if step % 4 == 3:
                    run_step(client, deployed.resolved, expected, [2] * depth, (i, step))
                else:
                    rows = depth + 2 + step
                    run_on_streams(
                        client, stream, deployed.resolved, expected, rows, depth, (i, step)
                    )
                if step % 3 == 2:
                    client.leave()  # the next announcement may follow before the FFN has seen this
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(x)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def rows_by_expert(deployed):
    """Returns the rows that each expert computed, by layer, summed over all FFN instances."""
    counts = [loop.rank.model.banks.expert_rows() for loop in deployed.loops.values()]
    return {
        layer: [sum(rows) for rows in zip(*(c[layer] for c in counts), strict=True)]
        for layer in counts[0]
    }


@pytest.mark.parametrize("y,redundant", [(1, 0), (2, 0), (3, 1)])
def test_no_expert_computes_padding_rows(deploy, tiny_models, y, redundant):
    deployed = deploy("deepseek_v3", 1, y, ffn={"redundant_experts": redundant})
    expected = reference_model(tiny_models("deepseek_v3"))
    client, stream = deployed.clients[0], stream_of(deployed, 0)
    model, computed = deployed.resolved.model, 0
    for rows, depth, real in [(8, 1, 5), (8, 2, 5), (8, 3, 7), (8, 3, 5), (9, 3, 9)]:
        run_on_streams(client, stream, deployed.resolved, expected, rows, depth, 0, real=real)
        computed += real * model.top_k
        by_layer = rows_by_expert(deployed)
        for layer in model.moe_layers:
            assert sum(by_layer[layer]) == computed


@given(st.data())
def test_padding_follows_the_real_rows(data):
    rows = data.draw(st.integers(1, 40))
    real, depth = data.draw(st.integers(0, rows)), data.draw(st.integers(1, min(3, rows)))
    slots = torch.tensor([7 * n for n in range(real)] + [-1] * (rows - real))
    start = 0
    for size in split_rows(rows, depth):
        padding = padding_of({"layer": slots[start : start + size]})
        kept = max(0, min(size, real - start))
        assert padding.tolist() == [[False]] * kept + [[True]] * (size - kept)
        start += size
    assert padding_of({}) is None


def test_a_step_rings_the_same_doorbells_each_time(deploy, tiny_models):
    deployed = deploy("qwen3_moe", 1, 1)
    expected = reference_model(tiny_models("qwen3_moe"))
    client, stream = deployed.clients[0], stream_of(deployed, 0)
    first = run_on_streams(client, stream, deployed.resolved, expected, 7, 3, 0)
    run_step(client, deployed.resolved, expected, [3], 1)
    second = run_on_streams(client, stream, deployed.resolved, expected, 7, 3, 2)
    assert (first.slots, first.flags) == (second.slots, second.flags)
    assert len(set(first.flags)) == len(first.flags) == 3 * len(deployed.resolved.model.moe_layers)


def test_both_sides_keep_when_their_stages_ran(deploy, tiny_models):
    deployed = deploy("qwen3_moe", 1, 1, metrics={"stage_every": 1})
    expected = reference_model(tiny_models("qwen3_moe"))
    client, stream = deployed.clients[0], stream_of(deployed, 0)
    layers = deployed.resolved.model.moe_layers
    order = [(layer, mb) for layer in layers for mb in range(3)]
    timestamps = StepTimestamps(HostStreams())
    began = time.monotonic_ns()
    run_on_streams(client, stream, deployed.resolved, expected, 7, 3, 0, timestamps)
    ours = timestamps.read(began, replayed=True)
    run_step(client, deployed.resolved, expected, [3, 2, 2], 1)
    ffn = deployed.loops[0].rank.metrics
    wait_for(lambda: len(ffn.step_traces.all()) == 2)
    replayed, hosted = ffn.step_traces.all()
    (by_host,) = client._observer.metrics.step_traces.all()
    for step in (ours, replayed, by_host, hosted):
        assert [(span.layer, span.micro_batch) for span in step.spans] == order
        assert (step.depth, step.rows) == (3, 7)
        times = [t for s in step.spans for t in (s.started_ns, s.done_ns)]
        assert times == sorted(times) and step.spans[-1].copied_ns <= step.ended_ns
        assert 0 < step.busy_ns <= step.ended_ns - step.began_ns
    assert (replayed.replayed, hosted.replayed, by_host.replayed) == (True, False, False)
    # Both sides share one clock: the FFN starts a position after it was sent.
    for theirs, mine in zip(replayed.spans, ours.spans, strict=True):
        assert mine.done_ns <= theirs.started_ns
    stages = dict(ffn.exported_stages())
    assert stages[Stage.FFN].count == 2 * len(order) and stages[Stage.F2A].count == len(order)


@pytest.mark.parametrize("rows,depth", [(0, 1), (2, 3), (7, 4), (65, 1), (194, 3)])
def test_an_invalid_announcement_ends_the_session(deploy, rows, depth):
    deployed = deploy("qwen3_moe", 1, 1)
    deployed.clients[0].begin_step(depth)
    deployed.clients[0].announce(rows)
    wait_for(lambda: not deployed.loops[0]._table.peers)


def wait_for(check):
    end = time.monotonic() + 5.0
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_peers_of_failed_waits():
    ok, gone, late = Status.OK, Status.PEER_GONE, Status.DEADLINE
    assert failed_peers([ok, ok, ok, ok], "ab") == ((), ())
    assert failed_peers([ok, gone, ok, gone], "ab") == (("b",), ())
    assert failed_peers([late, gone, ok, ok], "ab") == (("b",), ("a",))
