"""Routed dispatch and expert moves under captured steps, which tests/unit/tape.py stands in for."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch
from remote_support import Deployed, deploying, random_rows, reference_model
from tape import Tape, Taped, TapeRecorder, load_torch, take_bucket
from test_expert_moves import tables_for
from test_stream_steps import run_on_streams, stream_of

from afd.metrics.role import Captured, Direction
from afd.metrics.step_trace import NoTimestamps
from afd.schedule import row_shares, split_rows
from afd.wire.streams_torch import HostStreams
from attention_worker.remote.dispatch import Splitter
from attention_worker.remote.stream import StreamExperts
from ffn_worker import graphs
from ffn_worker.moe import registry


@pytest.fixture
def deploy(tiny_models):
    with deploying() as start:

        def make(family, x, y, backend="reference", dispatch="routed", **sections):
            sections = {"transport": {"backend": "ipc"}, "wire": {"dispatch": dispatch}, **sections}
            return start(tiny_models(family), x, y, backend, **sections)

        yield make


@pytest.mark.parametrize("tp", [1, 2])
def test_routed_stream_steps_match_the_reference(deploy, tiny_models, tp):
    deployed = deploy("deepseek_v3", 1, 3, ffn={"redundant_experts": 1, "tp": tp})
    expected = reference_model(tiny_models("deepseek_v3"))
    client, stream = deployed.clients[0], stream_of(deployed, 0)
    for rows, depth, real in [(8, 1, 5), (9, 2, 9), (3, 3, 3), (23, 3, 20)]:
        run_on_streams(client, stream, deployed.resolved, expected, rows, depth, rows, real=real)


class OverTcp(Deployed):
    """Streams send through the transport's proxy, which reads the number of rows when it sends."""

    STREAMS = ("tcp",)

    def region(self, role, slots, nbytes, index, tcp_host="127.0.0.1"):
        return super().region(role, slots, nbytes, index, tcp_host)


@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_follow_the_rows_over_tcp(tiny_models, tp):
    """Requests and answers carry the rows that an instance computes, and no more."""
    path, rows, few = tiny_models("deepseek_v3"), 13, SMALL | {"pipeline": {"depth": 1}}
    few["attention"] = SMALL["attention"] | {"instances": 1, "max_num_seqs": 16}
    deployed = OverTcp(
        path, 1, 3, "torch",
        transport={"backend": "tcp"}, wire={"dispatch": "routed"}, ffn={"tp": tp},
        attention=few["attention"], pipeline=few["pipeline"],
    )  # fmt: skip
    try:
        expected, r = reference_model(path), deployed.resolved
        client, stream = deployed.clients[0], stream_of(deployed, 0)
        splitter = Splitter(r.placement.bounds, tp, torch.device("cpu"))
        for seed, experts in enumerate([None, [0, 1], [7]]):
            before, sent = client._observer.metrics.wire_bytes[Direction.A2F], 0
            client.begin_step(1)
            stream.record(client.peers, NoTimestamps())
            client.announce(rows)
            stream.begin_step(1)
            for layer in r.model.moe_layers:
                x, ids, weights = random_rows(r, rows, 100 * seed + layer)
                if experts is not None:
                    ids = torch.tensor(experts, dtype=torch.int32)[ids % len(experts)]
                with stream.sending(layer, 0, rows):
                    stream.send(layer, 0, x, ids, weights)
                want = expected.forward(layer, x, ids, weights)
                torch.testing.assert_close(stream.recv(0), want, rtol=1e-4, atol=1e-4)
                ranks = range(r.slots.ffn_ranks)
                for j, count in enumerate(splitter.split(ids).of_ranks(ranks)):
                    request = deployed.regions[j].header(r.slots.to_ffn(0, 0))
                    assert request.count == count
                    beyond = 4 * r.model.top_k * (rows - count)  # ids travel whole
                    assert request.nbytes == r.a2f.message_bytes(count) + beyond
                    sent += request.nbytes
                    answer = client._region.header(r.slots.to_attention(j, 0))
                    start, end = row_shares(rows, tp)[j % tp]
                    assert answer.count == max(0, min(count, end) - start)
                    assert answer.nbytes == r.f2a.message_bytes(answer.count)
            stream.end_step()
            client.end_replay(stream.rows_sent)
            assert client._observer.metrics.wire_bytes[Direction.A2F] - before == sent
        for loop in deployed.loops.values():
            assert not loop.rank.metrics.late_peers
    finally:
        deployed.close()


class Recorded:
    """A step of one attention instance, recorded once. Each replay takes the inputs of its time."""

    def __init__(self, deployed, rows, depth, i=0):
        self.client, self.resolved = deployed.clients[i], deployed.resolved
        self.rows, self.parts = rows, split_rows(rows, depth)
        self.positions = [
            (layer, mb) for layer in self.resolved.model.moe_layers for mb in range(depth)
        ]
        self.inputs = {
            (layer, mb): random_rows(self.resolved, self.parts[mb], 0)
            for layer, mb in self.positions
        }
        region = Taped(self.client._region)
        self.stream = StreamExperts(
            self.resolved, i, region, HostStreams(), self.client.expert_slots
        )
        load_torch()
        self.tape, self.out = Tape(), {}
        peers = tuple(replace(peer, link=Taped(peer.link)) for peer in self.client.peers)
        self.client.begin_step(depth)
        self.stream.record(peers, NoTimestamps())
        self.client.announce(rows)
        with torch.inference_mode(), self.tape:
            self._run()
        self.client.end_step()

    def _run(self):
        stream = self.stream
        stream.begin_step(len(self.parts))
        sent = {}

        def take(mb):
            self.out[sent.pop(mb), mb] = stream.recv(mb).clone()

        for layer, mb in self.positions:
            if mb in sent:
                take(mb)
            x, ids, weights = self.inputs[layer, mb]
            with stream.sending(layer, mb, len(x)):
                stream.send(layer, mb, x, ids, weights)
            sent[mb] = layer
        for mb in list(sent):
            take(mb)
        stream.end_step()

    def fill(self, seed, experts=None):
        """experts: rows use these only; None: all."""
        for n, (key, inputs) in enumerate(self.inputs.items()):
            x, ids, weights = random_rows(self.resolved, self.parts[key[1]], 1000 * seed + n)
            if experts is not None:
                ids = torch.tensor(experts, dtype=torch.int32)[ids % len(experts)]
            for into, values in zip(inputs, (x, ids, weights), strict=True):
                into.copy_(values)

    def replay(self):
        self.client.begin_step(len(self.parts))
        self.client.announce(self.rows)
        with torch.inference_mode():
            self.tape.replay()
        self.client.end_replay(self.stream.rows_sent)

    def by_host(self):
        """The same step in host form."""
        client, out = self.client, {}
        client.begin_step(len(self.parts))
        for layer in self.resolved.model.moe_layers:
            for mb in range(len(self.parts)):
                client.send(layer, mb, *self.inputs[layer, mb])
            for mb in range(len(self.parts)):
                out[layer, mb] = client.recv(mb).clone()
        client.end_step()
        return out

    def check_bits(self):
        self.replay()
        for key, want in self.by_host().items():
            assert torch.equal(self.out[key], want), key

    def check_close(self, reference):
        self.replay()
        for key, (x, ids, weights) in self.inputs.items():
            want = reference.forward(key[0], x, ids, weights)
            torch.testing.assert_close(self.out[key], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family,dispatch,wire", [("deepseek_v3", "routed", "fp8"), ("qwen3_moe", "broadcast", "exact")]
)
def test_one_recording_has_the_bits_of_the_host_form(deploy, family, dispatch, wire):
    """Row counts change between replays, down to no row for an instance, and experts move."""
    deployed = deploy(
        family, 1, 3, "torch",
        wire={"dispatch": dispatch, "format": wire}, ffn={"redundant_experts": 1},
    )  # fmt: skip
    step = Recorded(deployed, 11, 2)
    for seed, experts in enumerate([None, [0], [0, 7, 3], None]):
        step.fill(seed, experts)
        step.check_bits()
    for seed in (1, 2):
        before = step.client.expert_slots.of(1, step.inputs[1, 0][1])
        deployed.move(tables_for(deployed, seed))
        assert not torch.equal(before, step.client.expert_slots.of(1, step.inputs[1, 0][1]))
        step.fill(seed)
        step.check_bits()


@pytest.fixture
def replayed(monkeypatch):
    """FFN instances capture steps on tapes. Returns whether each announced step was replayed."""
    steps = []
    dense = registry.Backend("reference", "tape:DenseBackend", (), tuple(registry.Scheme))
    monkeypatch.setitem(registry.BACKENDS, "reference", dense)

    def init(self, pipeline, exchange, *others):
        exchange.gate = Taped(exchange.gate)
        original_init(self, pipeline, exchange, *others)
        self.recorder = TapeRecorder()

    def run(self, step):
        steps.append(step.order.bucket > 0)
        return original_run(self, step)

    original_init, original_run = graphs.StreamSteps.__init__, graphs.StreamSteps.run
    monkeypatch.setattr("ffn_worker.slots.take_bucket", take_bucket)
    monkeypatch.setattr(graphs.StreamSteps, "__init__", init)
    monkeypatch.setattr(graphs.StreamSteps, "run", run)
    return steps


@pytest.mark.parametrize("dispatch", ["routed", "broadcast"])
def test_moves_need_no_new_capture(deploy, tiny_models, replayed, dispatch):
    """Steps go on while experts move. The shared expert is computed with the routed ones under
    broadcast, and by rows under routed dispatch."""
    reference = reference_model(tiny_models("deepseek_v3"))
    deployed = deploy("deepseek_v3", 2, 2, dispatch=dispatch, **SMALL)
    loops = deployed.loops.values()
    banks = [loop.rank.model.banks for loop in loops]
    layers = deployed.resolved.model.moe_layers
    assert all(bank.joined == (set(layers) if dispatch == "broadcast" else set()) for bank in banks)
    memory = addresses(banks, layers)
    steps = Steps(deployed, reference)
    steps.run(2)
    assert replayed and all(replayed)
    mover = threading.Thread(target=deployed.move, args=(tables_for(deployed, 1),))
    mover.start()
    steps.run(mover.is_alive)
    mover.join(20)
    assert not all(replayed)  # the hosts ran steps with rows of both banks
    for loop in loops:
        loop.wake()
    steps.run(3)
    assert all(replayed[-2:])
    assert all(len(bank.of(n)) == 1 and bank.of(n)[0].number == 1 for bank in banks for n in layers)
    assert memory == addresses(banks, layers)
    assert not any(loop.rank.metrics.graph_captures[Captured.AFTER] for loop in loops)


SMALL = {
    "attention": {
        "instances": 2,
        "dtype": "float32",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    },
    "pipeline": {"depth": 2, "min_rows": 4},
    "ffn": {"redundant_experts": 1, "step_wait_ms": 1000},
}
"""Few graphs."""


def addresses(banks, layers):
    return [part.data_ptr() for bank in banks for n in layers for part in bank._home.tensors(n)]


class Steps:
    """Replays one recorded step on every attention instance; the instances step together."""

    def __init__(self, deployed, reference):
        self._deployed, self._reference = deployed, reference
        self._seed = 0
        self._each(self._record)

    def _record(self, i):
        return Recorded(self._deployed, 3 + 5 * i, 1 + i, i)

    def _each(self, work):
        found, errors = {}, []

        def run(i):
            try:
                found[i] = work(i)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(i,)) for i in range(len(self._deployed.clients))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors, errors
        self._steps = found if any(found.values()) else self._steps

    def run(self, more):
        """more: how many steps, or whether to go on."""
        left = iter(range(more)) if isinstance(more, int) else None
        while next(left, None) is not None if left is not None else more():
            self._seed += 1
            self._each(self._step)

    def _step(self, i):
        step = self._steps[i]
        step.fill(self._seed + i, random.Random(self._seed).choice([None, [0, 1], [5]]))
        step.check_close(self._reference)
