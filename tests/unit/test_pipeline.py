"""The layer loop with stand-ins for the model, the remote experts and vLLM's context."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from attention_worker import pipeline
from attention_worker.pipeline import MicroBatch, run_layers

TOP_K = 2


class Layer:
    is_remote = True

    def __init__(self, index):
        self.index = index

    def attention_half(self, positions, hidden, residual):
        return hidden + 1, hidden

    def route(self, hidden):
        return torch.ones(len(hidden), TOP_K), torch.full((len(hidden), TOP_K), self.index)


class Remote:
    def __init__(self):
        self.sent = []
        self.hidden = {}

    def begin_step(self, depth):
        self.depth = depth

    def sending(self, layer, micro_batch, rows):
        assert rows == 2
        return nullcontext()

    def send(self, layer, micro_batch, hidden, ids, weights):
        self.sent.append((layer, micro_batch, ids.tolist()))
        self.hidden[micro_batch] = hidden

    def recv(self, micro_batch):
        return self.hidden.pop(micro_batch) * 2

    def end_step(self):
        assert not self.hidden


def test_rows_without_a_request_are_sent_without_experts(monkeypatch):
    padding = torch.tensor([[False], [True]])
    batches = [
        MicroBatch(0, SimpleNamespace(), torch.arange(2), torch.zeros(2, 4)),
        MicroBatch(1, SimpleNamespace(), torch.arange(2), torch.zeros(2, 4), padding=padding),
    ]
    monkeypatch.setattr(pipeline, "micro_batches", lambda hidden, positions: batches)
    remote = Remote()
    out = run_layers([Layer(5), Layer(6)], lambda x, residual: (x, residual), remote, None, None)
    assert remote.depth == 2
    assert out.tolist() == [[6.0] * 4] * 4  # ((0 + 1) * 2 + 1) * 2
    assert remote.sent == [
        (layer, mb, [[layer] * TOP_K, [-1 if mb else layer] * TOP_K])
        for layer in (5, 6)
        for mb in (0, 1)
    ]
