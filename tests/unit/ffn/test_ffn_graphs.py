"""FFN graphs with many attention instances: nothing that changes from step to step is in a graph.

On the reference accelerator a graph is enqueued anew each time, by the code that a GPU captures.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from remote_support import DEPTH, Deployed, deploying, random_rows, reference_model, run_step
from test_stream_steps import run_on_streams, stream_of

from afd.config.resolve import Resolved
from afd.metrics.role import Captured
from afd.metrics.step_trace import NoTimestamps
from afd.schedule import split_rows
from afd_bench.scale.cli import announced
from afd_bench.scale.shared import Case

NO_TIMESTAMPS = NoTimestamps()
SMALL = {"max_num_seqs": 16}


class Graphs(Deployed):
    """answers: backend of the FFN ranks' links; attention's streams need ipc."""

    def __init__(self, checkpoint, x, y, answers="ipc", **sections):
        self.answers = answers
        super().__init__(checkpoint, x, y, **{"transport": {"backend": "ipc"}, **sections})

    @staticmethod
    def parsed(checkpoint, sections):
        sections["attention"] |= SMALL
        return Deployed.parsed(checkpoint, sections)

    def of_ffn(self, resolved: Resolved) -> Resolved:
        transport = resolved.deployment.transport.model_copy(update={"backend": self.answers})
        deployment = resolved.deployment.model_copy(update={"transport": transport})
        return replace(resolved, deployment=deployment)

    def region(self, role, slots, nbytes, index):
        tcp = "127.0.0.1" if self.answers == "tcp" and role == "attention" else None
        return super().region(role, slots, nbytes, index, tcp_host=tcp)

    @property
    def captures(self):
        return [loop.rank.metrics.graph_captures for loop in self.loops.values()]

    @property
    def late(self):
        return [loop.rank.metrics.late_peers for loop in self.loops.values()]


@pytest.fixture
def deploy(tiny_models):
    with deploying(Graphs) as start:
        yield lambda family, *arguments, **sections: start(
            tiny_models(family), *arguments, **sections
        )


def in_threads(work, count):
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, i) for i in range(count)]:
            done.result(60)


def answers_on_streams(client, stream, resolved, rows, depth, seed):
    """Runs a step; returns its answers in the order of the step."""
    answers, sent = [], set()
    client.begin_step(depth)
    stream.record(client.peers, NO_TIMESTAMPS)
    client.announce(rows)
    stream.begin_step(depth)
    for layer, mb, part in positions(resolved, rows, depth):
        if mb in sent:
            answers.append(stream.recv(mb).clone())
        with stream.sending(layer, mb, part):
            stream.send(layer, mb, *random_rows(resolved, part, hash((seed, layer, mb)) % 2**31))
        sent.add(mb)
    answers += [stream.recv(mb).clone() for mb in sorted(sent)]
    stream.end_step()
    client.end_step()
    return answers


def answers_of_host(client, resolved, rows, depth, seed):
    """The same step, message by message."""
    answers, sent = [], set()
    client.begin_step(depth)
    for layer, mb, part in positions(resolved, rows, depth):
        if mb in sent:
            answers.append(client.recv(mb).clone())
        client.send(layer, mb, *random_rows(resolved, part, hash((seed, layer, mb)) % 2**31))
        sent.add(mb)
    answers += [client.recv(mb).clone() for mb in sorted(sent)]
    client.end_step()
    return answers


def positions(resolved, rows, depth):
    for layer in resolved.model.moe_layers:
        for mb, part in enumerate(split_rows(rows, depth)):
            yield layer, mb, part


@pytest.mark.parametrize(
    ("family", "answers", "x", "y", "tp"),
    [
        ("qwen3_moe", "ipc", 3, 1, 1),
        ("qwen3_moe", "shm", 2, 1, 2),
        ("qwen3_moe", "tcp", 2, 2, 2),
        ("deepseek_v3", "ipc", 2, 2, 2),
    ],
)
def test_both_forms_give_the_same_bits(deploy, family, answers, x, y, tp):
    """One instance after the other: a sum over another batch may round differently. For the same
    reason shared experts, which compute masked rows too, are only close."""
    deployed = deploy(family, x, y, answers, ffn={"tp": tp})
    rng = random.Random(f"{family} {answers} {tp}")
    streams = [stream_of(deployed, i) for i in range(x)]
    shared = deployed.resolved.model.shared_intermediate
    for step in range(8):
        i, rows, depth = rng.randrange(x), rng.randint(3, 16), rng.randint(1, DEPTH)
        client = deployed.clients[i]
        case = deployed.resolved, rows, depth, step
        want = answers_of_host(client, *case)
        got = answers_on_streams(client, streams[i], *case)
        bound = 1e-5 if shared else 0.0
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)
        client.leave()
    graphs = sum(map(len, deployed.resolved.contract.graph_buckets))
    assert deployed.captures == [[graphs, 0]] * (y * tp)


def on_host(deployed):
    """Returns the list that the announced steps of hosts are added to, by all ranks."""
    steps = []
    for loop in deployed.loops.values():
        host, run = loop.steps._on_host, loop.steps._on_host.run

        def counted(step, run=run):
            steps.append(step)
            return run(step)

        host.run = counted
    return steps


def test_random_arrivals_of_eight_instances_capture_nothing(deploy, tiny_models):
    x = 8
    deployed = deploy("qwen3_moe", x, 1, ffn={"step_wait_ms": 1.0, "late_ms": 20_000.0})
    expected = reference_model(tiny_models("qwen3_moe"))
    hosted = on_host(deployed)

    def work(i):
        rng, client, stream = random.Random(i), deployed.clients[i], stream_of(deployed, i)
        for step in range(10):
            depth = rng.randint(1, DEPTH)
            if rng.random() < 0.2:
                run_step(client, deployed.resolved, expected, [2] * depth, (i, step))
            else:
                # No more rows per micro-batch than a step of depth 3 has.
                rows = rng.randint(depth, 6 * depth)
                run_on_streams(client, stream, deployed.resolved, expected, rows, depth, (i, step))
            if rng.random() < 0.3:
                client.leave()
                time.sleep(rng.random() / 50)
        client.leave()

    in_threads(work, x)
    graphs = sum(map(len, deployed.resolved.contract.graph_buckets))
    assert deployed.captures == [[graphs, 0]] and not hosted and deployed.late == [0]


def test_a_step_larger_than_every_graph_runs_on_the_host(deploy, tiny_models):
    deployed = deploy("deepseek_v3", 1, 2, ffn={"tp": 2})
    expected = reference_model(tiny_models("deepseek_v3"))
    hosted, stream = on_host(deployed), stream_of(deployed, 0)
    for step, (rows, depth, on) in enumerate([(40, 1, 4), (16, 1, 4), (60, 2, 8), (9, 3, 8)]):
        run_on_streams(deployed.clients[0], stream, deployed.resolved, expected, rows, depth, step)
        assert len(hosted) == on
    assert deployed.late == [0] * 4


@pytest.mark.parametrize(("rows", "late_ms"), [(12, 1200.0), (60, 1200.0)])
@pytest.mark.parametrize("dies", [False, True])
def test_an_instance_that_stops_within_a_step_costs_the_others_one_deadline(
    deploy, tiny_models, rows, late_ms, dies
):
    """rows: 12 run on streams, 60 on the host."""
    # The two announcements may be far apart on a busy host: step_wait_ms is as long as it may be.
    late_s = late_ms / 1e3
    sections = {"ffn": {"late_ms": late_ms, "step_wait_ms": late_ms}}
    deployed = deploy("qwen3_moe", 2, 1, **sections)
    resolved, expected = deployed.resolved, reference_model(tiny_models("qwen3_moe"))
    stopping, other = deployed.clients
    streams = [stream_of(deployed, i) for i in range(2)]
    together = threading.Barrier(2)

    def stop():
        run_on_streams(stopping, streams[0], resolved, expected, 6, 3, 0)  # active from here on
        together.wait()
        stopping.begin_step(3)
        streams[0].record(stopping.peers, NO_TIMESTAMPS)
        stopping.announce(rows)
        streams[0].begin_step(3)
        layer = resolved.model.moe_layers[0]
        for mb, part in enumerate(split_rows(rows, 3)[:2]):
            streams[0].send(layer, mb, *random_rows(resolved, part, mb))
        if dies:
            stopping.close()

    def go_on():
        run_on_streams(other, streams[1], resolved, expected, 6, 3, 0)
        together.wait()
        began = time.monotonic()
        run_on_streams(other, streams[1], resolved, expected, rows, 3, 1)
        return time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        stopped, went_on = pool.submit(stop), pool.submit(go_on)
        stopped.result(20)
        took = went_on.result(20)
    assert took < 3 * late_s + 1.0 and (dies or took >= late_s)
    for step in range(3):  # its session has ended
        run_on_streams(other, streams[1], resolved, expected, rows, 3, 2 + step)
    assert deployed.late == [1] and deployed.captures[0][Captured.AFTER] == 0
    if dies:
        deployed.clients.remove(stopping)
        deployed.leave("attention-0")


def test_an_instance_that_joins_later_needs_no_capture(deploy, tiny_models):
    deployed = deploy("qwen3_moe", 2, 1)
    expected = reference_model(tiny_models("qwen3_moe"))
    graphs = sum(map(len, deployed.resolved.contract.graph_buckets))
    hosted = on_host(deployed)
    for generation in range(3):
        client, other = deployed.clients[1], deployed.clients[0]
        for i, one in enumerate((other, client)):
            run_on_streams(
                one, stream_of(deployed, i), deployed.resolved, expected, 7, 3, generation
            )
            one.leave()
        client.close()
        deployed.leave("attention-1")
        deployed.clients[1] = deployed.client(1)
    assert deployed.captures == [[graphs, 0]] and not hosted


def test_the_leader_needs_little_time_per_step_with_64_members(capsys):
    """From one replay to the next, with 40 attention instances and 23 heads."""
    took = announced(Case(40, 24), steps=200)
    with capsys.disabled():
        print(f"\nleader with 64 members: {took.median_us:.0f} us per step")
    assert took.median_us < 5e3
