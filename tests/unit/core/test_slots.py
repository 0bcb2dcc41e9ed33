"""Gathering rows from several messages, and adding answers, in plain torch."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.schedule import row_shares
from afd.wire.layout import layouts
from afd.wire.rows_torch import EncodedRows
from afd.wire.slot_torch import sum_of_parts, take_bucket, take_rows
from afd.wire.slot_view_torch import RoutedRows, SlotView
from afd_bench.gpu import main
from afd_bench.step3 import fused_kernels as fused
from attention_worker.kernels import fused_attention as served

FP8 = torch.float8_e4m3fn


def filled(layout, seed):
    """Returns a slot filled with random rows."""
    generator = torch.Generator().manual_seed(seed)
    view = SlotView(torch.zeros(layout.nbytes, dtype=torch.uint8), layout)
    shape = (layout.capacity, layout.hidden)
    rows = EncodedRows.of(torch.randn(shape, generator=generator).bfloat16(), layout.tag)
    view.payload.copy_(rows.payload)
    if view.scales is not None:
        view.scales.copy_(rows.scales)
    if view.ids is not None:
        view.ids.copy_(torch.randint(0, 9, view.ids.shape, generator=generator))
        view.weights.copy_(torch.rand(view.weights.shape, generator=generator))
    return view


@settings(max_examples=20)
@given(
    st.sampled_from(["exact", "fp8", "mxfp4"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sets(st.integers(0, 3)),
)
def test_rows_of_messages_are_concatenated_in_order(wire, counts, masked):
    layout, _ = layouts(wire, "bfloat16", 6, 256, 2)
    views = [filled(layout, seed) for seed in range(len(counts))]
    into = RoutedRows.empty_like(views[0], sum(counts) + 2)
    into.ids.fill_(7)
    take_rows(views, counts, into, masked)
    want = [view.decode(n, torch.float32) for view, n in zip(views, counts, strict=True)]
    taken = into.cut(0, sum(counts))
    assert torch.equal(taken.x.decode(torch.float32), torch.cat(want))
    ids = [
        torch.full_like(view.ids[:n], -1) if i in masked else view.ids[:n]
        for i, (view, n) in enumerate(zip(views, counts, strict=True))
    ]
    assert torch.equal(taken.ids, torch.cat(ids)) and (into.ids[sum(counts) :] == 7).all()
    weights = [view.weights[:n] for view, n in zip(views, counts, strict=True)]
    assert torch.equal(taken.weights, torch.cat(weights))


@settings(max_examples=30)
@given(
    st.sampled_from(["exact", "fp8", "mxfp4"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_a_bucket_holds_the_rows_that_were_sent_and_masks_the_others(wire, counts, tp, spare):
    layout, _ = layouts(wire, "bfloat16", 9, 256, 2)
    views = [filled(layout, seed) for seed in range(len(counts))]
    bucket = max(1, *counts) + spare
    into = RoutedRows.empty_like(views[0], len(counts) * bucket)
    take_bucket(views, torch.tensor(counts, dtype=torch.int32), bucket, tp, into)
    for i, (view, count) in enumerate(zip(views, counts, strict=True)):
        sent, here = RoutedRows.of(view, count), into.cut(i * bucket, (i + 1) * bucket)
        # Each rank finds its share of the message at the beginning of its share of the bucket.
        places = [
            place + n
            for (begin, end), (place, limit) in zip(
                row_shares(count, tp), row_shares(bucket, tp), strict=True
            )
            for n in range(end - begin)
            if place + n < limit
        ]
        assert len(places) == count and places == sorted(set(places))
        assert torch.equal(here.ids[places], sent.ids)
        assert torch.equal(here.weights[places], sent.weights)
        assert torch.equal(here.x.decode(torch.float32)[places], sent.x.decode(torch.float32))
        masked = [n for n in range(bucket) if n not in places]
        assert (here.ids[masked] == -1).all() and not here.weights[masked].any()
        assert not here.x.payload.view(torch.uint8)[masked].any()


def test_one_message_is_not_copied():
    layout, _ = layouts("fp8", "bfloat16", 6, 256, 2)
    view = filled(layout, 0)
    rows = RoutedRows.of(view, 4)
    assert rows.x.payload.data_ptr() == view.payload.data_ptr() and len(rows.x) == 4
    assert rows.ids.data_ptr() == view.ids.data_ptr()


@pytest.mark.parametrize("wire", ["exact", "mxfp4"])
def test_answers_are_added_in_float32(wire):
    _, layout = layouts(wire, "bfloat16", 6, 256, 2)
    views = [filled(layout, seed) for seed in range(3)]
    want = sum(view.decode(5, torch.float32) for view in views).bfloat16()
    assert torch.equal(sum_of_parts(views, 5, torch.bfloat16), want)
    assert sum_of_parts(views[:1], 5, torch.bfloat16).equal(views[0].decode(5, torch.bfloat16))


def test_references_equal_the_operations_they_fuse():
    """The operations around the matrix products of an attention layer."""
    torch.manual_seed(0)
    rows, low, heads, width, page = 5, 256, 2, 64, 4
    parts = [torch.randn(rows, low).bfloat16() for _ in range(2)]
    residual, weight = torch.randn(rows, low).bfloat16(), torch.randn(low).bfloat16()
    x = sum(part.double() for part in parts) + residual.double()
    codes, scale = fused.plain_sum_norm_quantise(parts, residual, weight, 1e-5, FP8)
    torch.testing.assert_close(residual, x.bfloat16(), rtol=2**-7, atol=0)
    want = torch.nn.functional.rms_norm(x, (low,), weight.double(), 1e-5)
    largest = want.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale.double(), largest / 448, rtol=1e-5, atol=0)
    assert ((codes.double() * scale - want).abs() <= want.abs() / 16 + largest * 2**-16).all()

    qkv = torch.randn(rows, low + 2 * heads * width).bfloat16()
    product = fused.Product(qkv / 4, torch.full((rows, 1), 2.0), torch.full((qkv.shape[1],), 2.0))
    angle = torch.rand(9, width // 2) * 6
    rope = served.Rope(torch.cat([angle.cos(), angle.sin()], -1), torch.tensor([3, 0, 8, 1, 1]))
    slots = torch.tensor([5, 0, -1, 7, 2])
    one = torch.ones(1)
    cache = served.PagedCache(
        *(torch.zeros(2, page, heads, width) for _ in range(2)), (one, one), slots
    )
    fused.plain_norm_store(product, weight, 1e-5, rope, cache, FP8)
    keys = cache.keys.flatten(0, 1)
    turn = torch.polar(torch.ones(rows, 1, width // 2), angle[rope.positions][:, None])
    k = qkv[:, low:].float().view(rows, 2, heads, 2, width // 2)[:, 0]
    turned = torch.view_as_real(torch.complex(k[:, :, 0], k[:, :, 1]) * turn)
    turned = torch.cat([turned[..., 0], turned[..., 1]], -1)
    written = slots >= 0
    torch.testing.assert_close(keys[slots[written]], turned[written])
    assert (keys[[1, 3, 4, 6]] == 0).all()
    assert torch.equal(
        cache.values.flatten(0, 1)[slots[written]],
        qkv[:, low + heads * width :].float().view(rows, heads, width)[written],
    )
    q = qkv[:, low : low + heads * width].contiguous()
    q = fused.Product(q, torch.ones(rows, 1), torch.ones(heads * width))
    half = torch.tensor([0.5])
    got = fused.plain_rope_quantise(q, width, rope, half, FP8)
    want = (turned.flatten(1) * 2).clamp(-448, 448)
    assert ((got.float() - want).abs() <= want.abs() / 16 + 2**-10).all()
    assert torch.equal(
        fused.plain_rope_quantise(q, width, rope, half, torch.bfloat16),
        turned.flatten(1).bfloat16(),
    )
    product = fused.Product(parts[0], torch.full((rows, 1), 0.5), torch.ones(low))
    x = residual.double() + parts[0].double() / 2
    got = fused.plain_add_norm(product, residual, weight, 1e-5)
    want = torch.nn.functional.rms_norm(x, (low,), weight.double(), 1e-5)
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(residual.double(), x, rtol=2**-7, atol=0)
    zeros, broken = torch.zeros(1, low), torch.full((1, low), torch.inf)
    codes, scale = fused.plain_quantise_rows(torch.cat([zeros, broken]), FP8)
    assert (codes[0].float() == 0).all() and scale[0].isfinite() and scale[1].isnan()


def test_the_bench_of_fused_kernels_runs_without_a_gpu(tmp_path):
    out = tmp_path / "r.json"
    assert main(["fused", "--device", "cpu", "--out", str(out)]) == 0
    cases = [record["case"] for record in json.loads(out.read_text())]
    assert "sum of two answers" in cases and len(cases) == 3
