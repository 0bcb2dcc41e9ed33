"""The layer loop with stand-ins for model and remote experts, without vLLM."""

import subprocess
import sys
from contextlib import nullcontext

import torch

from attention_worker.pipeline import MicroBatch, run_layers

TOP_K = 2


class Layer:
    is_remote = True

    def __init__(self, index):
        self.index = index

    def attention_half(self, positions, hidden, residual):
        return hidden + 1, hidden, None

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

    def send(self, layer, micro_batch, hidden, ids, weights, encoded):
        self.sent.append((layer, micro_batch, ids.tolist()))
        self.hidden[micro_batch] = hidden

    def recv(self, micro_batch):
        return self.hidden.pop(micro_batch) * 2

    def end_step(self):
        assert not self.hidden


def test_rows_without_a_request_are_sent_without_experts():
    padding = torch.tensor([[False], [True]])
    batches = [
        MicroBatch(0, nullcontext, torch.arange(2), torch.zeros(2, 4)),
        MicroBatch(1, nullcontext, torch.arange(2), torch.zeros(2, 4), padding=padding),
    ]
    remote = Remote()
    out = run_layers([Layer(5), Layer(6)], lambda x, residual: (x, residual), remote, batches)
    assert remote.depth == 2
    assert out.tolist() == [[6.0] * 4] * 4  # ((0 + 1) * 2 + 1) * 2
    assert remote.sent == [
        (layer, mb, [[layer] * TOP_K, [-1 if mb else layer] * TOP_K])
        for layer in (5, 6)
        for mb in (0, 1)
    ]


def test_inputs_of_tapped_layers_are_kept():
    """Those of an EAGLE-3 head: hidden states plus residual, of every micro-batch."""
    batches = [MicroBatch(i, nullcontext, torch.arange(2), torch.zeros(2, 4)) for i in range(2)]
    layers = [Layer(i) for i in range(3)]
    run_layers(layers, lambda x, residual: (x, residual), Remote(), batches, (0, 2, 3))
    for batch in batches:
        # Layer 1 gets 2 and the residual 0, layer 2 gets 6 and 2, the final norm 14 and 6.
        assert [rows.tolist() for rows in batch.tapped] == [[[v] * 4] * 2 for v in (0, 8, 20)]


def test_only_the_hooks_import_vllm():
    """The pipeline, the instance and both kinds of remote experts import without vLLM."""
    modules = [
        "attention_worker.instance",
        "attention_worker.model",
        "attention_worker.pipeline",
        "attention_worker.plugin",
        "attention_worker.remote.replay_guard",
        "attention_worker.vllm_hooks.command",
        "attention_worker.vllm_hooks.padding",
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
