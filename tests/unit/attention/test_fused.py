"""Fused attention halves: which run, their references, and the kernels in Triton's interpreter."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_cases import empty, heads_case, low_rank_case

from afd.config.sections import Attention
from afd.errors import ConfigError
from afd.wire.layout import Tag, layouts
from afd.wire.rows_torch import EncodedRows
from attention_worker.fused import Facts, Wanted, chosen, why_not_attention, why_not_encoding
from attention_worker.kernels import fused_attention as fused
from attention_worker.model import LayerHalves
from attention_worker.pipeline import MicroBatch, run_layers
from attention_worker.remote.encoded_batch import encode

WANTED = Wanted("auto", Tag.E4M3FN, 256, 1, scales_measured=False)
FACTS = Facts("FLASH_ATTN", True, 128, True, "auto", False)


def test_the_kernels_run_where_device_and_shapes_allow_it():
    assert why_not_attention(FACTS, WANTED) is None
    assert why_not_encoding(WANTED) is None
    for changes, said in (
        ({"flash": False, "backend": "FLASHINFER"}, "FLASHINFER"),
        ({"whole_heads": False}, "rotary"),
        ({"head_dim": 96}, "96 columns"),
        ({"cache": "fp8_e5m2"}, "fp8_e5m2"),
        ({"shared": True}, "share"),
    ):
        assert said in why_not_attention(replace(FACTS, **changes), WANTED)
    assert "scales" in why_not_attention(FACTS, replace(WANTED, scales_measured=True))
    for changes, said in (
        ({"tag": Tag.BFLOAT16}, "not FP8"),
        ({"tag": Tag.E2M1}, "not FP8"),
        ({"hidden": 200}, "multiple of 128"),
        ({"ranks": 2}, "each rank"),
    ):
        assert said in why_not_encoding(replace(WANTED, **changes))


def test_the_switch():
    assert chosen("auto", None) and chosen(True, None)
    assert not chosen("auto", "no") and not chosen(False, None)
    with pytest.raises(ConfigError, match=r"attention\.fused is true, but no; set it to auto"):
        chosen(True, "no")
    assert Attention().fused is False  # until tokens of a server on a GPU were compared
    assert Attention(fused=True, device="cuda").fused is True
    with pytest.raises(ValueError, match="fused true needs device cuda, not cpu"):
        Attention(fused=True)


def rms(x, weight, eps):
    return torch.nn.functional.rms_norm(x.double(), (len(weight),), weight.double(), eps)


def turned(x, rope):
    """Rotates x, [rows, heads, width], by complex numbers."""
    cos, sin = rope.cos_sin[rope.positions].double()[:, None].chunk(2, -1)
    first, second = x.double().chunk(2, -1)
    y = torch.complex(first, second) * torch.complex(cos, sin)
    return torch.cat([y.real, y.imag], -1)


def test_the_reference_of_heads_equals_single_operations():
    case = heads_case("cpu", torch.float32, dtype=torch.float32)
    qkv, norms, rope, cache, queries = case
    got = fused.plain_store_heads(qkv, norms, rope, cache, queries)
    q, k, v = qkv.unflatten(1, (-1, 64)).split([6, 2, 2], dim=1)
    want = turned(rms(q, norms.q, norms.eps), rope).flatten(1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    kept = cache.slots >= 0
    keys, values = (x.flatten(0, 1)[cache.slots[kept]] for x in (cache.keys, cache.values))
    stored = len(cache.slots)
    want = turned(rms(k, norms.k, norms.eps), rope)[:stored][kept]
    torch.testing.assert_close(keys.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(values, v[:stored][kept])
    assert (cache.keys != 0).flatten(2).any(-1).sum() == kept.sum()


def test_the_reference_of_low_rank_queries_equals_single_operations():
    qkv, weight, rope, cache, queries = low_rank_case("cpu", torch.float32, dtype=torch.float32)
    got = fused.plain_store_low_rank(qkv, weight, 1e-5, rope, cache)
    torch.testing.assert_close(got.double(), rms(qkv[:, :96], weight, 1e-5), rtol=1e-5, atol=1e-5)
    kept, stored = cache.slots >= 0, len(cache.slots)
    keys = cache.keys.flatten(0, 1)[cache.slots[kept]]
    want = turned(qkv[:, None, 96:160], rope)[:stored][kept]
    torch.testing.assert_close(keys.double(), want, rtol=1e-5, atol=1e-5)
    q = qkv[:, :192].contiguous()
    got = fused.plain_rotate_heads(q, 64, rope, queries)
    want = turned(q.unflatten(1, (-1, 64)), rope).flatten(1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_fp8_caches_and_queries_are_divided_by_their_scales():
    fp8 = torch.float8_e4m3fn
    qkv, norms, rope, cache, queries = heads_case("cpu", fp8)
    plain = empty(replace(cache, keys=cache.keys.float(), values=cache.values.float()))
    got = fused.plain_store_heads(qkv, norms, rope, cache, queries)
    exact = fused.plain_store_heads(qkv, norms, rope, plain, fused.Queries(torch.float32, None))
    for mine, theirs, scale in (
        (got, exact, queries.scale),
        (cache.keys, plain.keys, cache.scales[0]),
        (cache.values, plain.values, cache.scales[1]),
    ):
        assert mine.dtype == fp8
        want = (theirs / scale).clamp(-448, 448)
        assert ((mine.float() - want).abs() <= want.abs() / 16 + 2**-10).all()


class Norm(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(hidden).bfloat16(), requires_grad=False)

    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        y = fused.plain_norm(total.float(), self.weight, 1e-6).bfloat16()
        return y if residual is None else (y, total)


class Decoder(torch.nn.Module):
    """A decoder layer with a stand-in for attention."""

    def __init__(self, hidden):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.self_attn = torch.nn.Module()
        self.self_attn.forward = lambda positions, hidden_states: hidden_states * 2


class Messages:
    """Remote experts that keep what each send encodes, and answer with the rows."""

    def __init__(self, layout):
        self.layout, self.sent, self.encoded = layout, [], []

    def begin_step(self, depth):
        self.hidden = {}

    def sending(self, layer, micro_batch, rows):
        return contextlib.nullcontext()

    def send(self, layer, micro_batch, hidden, ids, weights, encoded=None):
        self.hidden[micro_batch] = hidden
        self.encoded.append(encoded is not None)
        self.sent.append(encode(self.layout, layer, hidden, ids, weights, encoded))

    def recv(self, micro_batch):
        return self.hidden.pop(micro_batch)

    def end_step(self):
        pass


@pytest.mark.parametrize("depth", [1, 3])
def test_fused_halves_send_the_same_messages(depth):
    """Through the pipeline, with the references in place of the kernels."""
    from afd.models.qwen3_moe import FAMILY

    torch.manual_seed(0)
    layout, _ = layouts("fp8", "bfloat16", 8, 256, 2)
    decoders, x = [Decoder(256) for _ in range(2)], torch.randn(3 * depth, 256).bfloat16()

    def router(hidden):
        return torch.ones(len(hidden), 2), torch.zeros(len(hidden), 2, dtype=torch.int32)

    def run(fusion):
        remote = Messages(layout)
        halves = [LayerHalves(d, i, FAMILY, router) for i, d in enumerate(decoders)]
        for half in halves if fusion else ():
            weight = half.post_norm.weight

            def norm(hidden, residual, weight=weight):
                rows, encoded = fused.plain_add_norm_encode(
                    hidden, residual, weight, 1e-6, layout.tag
                )
                return rows, residual, encoded

            half.fuse(lambda positions, hidden_states: hidden_states + hidden_states, norm)
        batches = [
            MicroBatch(i, contextlib.nullcontext, torch.arange(3), part)
            for i, part in enumerate(x.clone().split(3))
        ]
        out = run_layers(halves, decoders[0].input_layernorm, remote, batches)
        return out, remote

    (out, plain), (again, ours) = run(False), run(True)
    assert torch.equal(out, again)
    assert all(ours.encoded) and not any(plain.encoded) and len(ours.sent) == 2 * depth
    for mine, theirs in zip(ours.sent, plain.sent, strict=True):
        assert torch.equal(mine.payload.view(torch.uint8), theirs.payload.view(torch.uint8))
        assert torch.equal(mine.scales, theirs.scales)


INTERPRETED = """
import torch
from fused_cases import check_encoding, check_heads, check_low_rank
from afd.wire.layout import Tag
kind = torch.float32  # the interpreter does not round to bfloat16 and FP8 as GPUs do
check_heads("cpu", kind, dtype=kind)
check_low_rank("cpu", kind, dtype=kind)
check_encoding("cpu", Tag.E4M3FN, dtype=kind, codes=False)
print("equal")
"""


@pytest.mark.long  # needs Triton beside torch for CPUs: pip install triton
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_equal_their_references_in_tritons_interpreter():
    found = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.stdout == "equal\n", found.stderr[-3000:]


def test_rows_that_a_kernel_encoded_are_not_encoded_again():
    layout, _ = layouts("fp8", "bfloat16", 8, 256, 2)
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    hidden, other = torch.zeros(3, 256).bfloat16(), torch.ones(3, 256).bfloat16()
    batch = encode(layout, 1, hidden, ids, weights, EncodedRows.of(other, layout.tag))
    assert torch.equal(batch.scales, torch.full((3, 2), 1 / 448))
