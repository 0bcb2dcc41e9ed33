"""Routed dispatch with constant shapes equals the host's, on random rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.placement.dispatch import rows_of_instances
from afd.schedule import row_shares
from afd.wire.codecs_torch import encode as encode_rows
from afd.wire.layout import layouts
from afd.wire.slot_torch import PlacedAnswers, sum_of_shares
from afd.wire.slot_view_torch import SlotView
from attention_worker.remote.dispatch import Splitter
from attention_worker.remote.encoded_batch import encode
from attention_worker.remote.stream_dispatch import StreamSplitter

HIDDEN = 128


@st.composite
def routings(draw):
    """Returns (bounds of the instances' slots, slots [rows][top_k], bank). Includes instances
    without a row, rows without an expert, and rows that choose a slot twice."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    bounds = tuple(itertools.accumulate(sizes, initial=0))
    rows, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    slot = st.integers(-1, draw(st.integers(-1, bounds[-1] - 1)))
    slots = [[draw(slot) for _ in range(top_k)] for _ in range(rows)]
    return bounds, slots, draw(st.integers(0, 1))


def in_bank(slots, bounds, bank):
    ids = torch.tensor(slots, dtype=torch.int32)
    return torch.where(ids < 0, ids, ids + bank * bounds[-1])


@settings(max_examples=25)
@given(routings(), st.sampled_from(["exact", "fp8", "mxfp4"]), st.integers(0, 2**31))
def test_messages_are_those_of_the_host_form(routing, wire, seed):
    bounds, slots, bank = routing
    ids = in_bank(slots, bounds, bank)
    rows, top_k = ids.shape
    layout, _ = layouts(wire, "float32", 16, HIDDEN, top_k)
    g = torch.Generator().manual_seed(seed)
    hidden, weights = torch.randn(rows, HIDDEN, generator=g), torch.rand(rows, top_k, generator=g)
    batch = encode(layout, 3, hidden, ids, weights)
    plan = Splitter(bounds, 1, torch.device("cpu")).split(ids)
    host = batch.by_rank(plan)
    splitter = StreamSplitter(bounds, 2, torch.device("cpu"))
    splitter.begin_step()
    split = splitter.split(1, batch)
    splitter.end_step()
    assert splitter.sent_in_step == list(plan.counts)
    words = splitter._words[1]
    assert tuple(words.tolist()) == plan.counts
    assert split.counts == tuple(words[j].data_ptr() for j in range(len(words)))
    begin = 0
    for j, (mine, expected) in enumerate(
        zip(split.batches, rows_of_instances(slots, bounds), strict=True)
    ):
        count = plan.counts[j]
        assert split.places.rows[j, :count].tolist() == list(expected)
        assert [split.places.of_rows[j, row] for row in expected] == list(range(count))
        assert int((split.places.of_rows[j] >= 0).sum()) == count
        here = slice(begin, begin + count)
        assert mine.rows == rows and len(mine.payload) == rows
        pairs = [(mine.payload, host.payload), (mine.ids, host.ids), (mine.weights, host.weights)]
        if host.scales is not None:
            pairs.append((mine.scales, host.scales))
        for part, want in pairs:
            assert part.is_contiguous()
            assert torch.equal(part[:count].view(torch.uint8), want[here].view(torch.uint8))
        assert (mine.ids[count:] == -1).all()  # nobody computes what is beyond the count
        begin += count


@settings(max_examples=25)
@given(
    routings(), st.sampled_from(["exact", "fp8", "mxfp4"]), st.integers(1, 3), st.integers(0, 2**31)
)
def test_sums_of_answers_have_the_bits_of_the_host_form(routing, wire, tp, seed):
    """Each instance answers its rows only: in host form its ranks share these, in stream form they
    share the places of all rows."""
    bounds, slots, bank = routing
    ids = in_bank(slots, bounds, bank)
    rows, instances = len(ids), len(bounds) - 1
    plan = Splitter(bounds, tp, torch.device("cpu")).split(ids)
    places = StreamSplitter(bounds, 1, torch.device("cpu")).places(ids)
    _, layout = layouts(wire, "float32", 16, HIDDEN, ids.shape[1])
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randn(instances, rows, HIDDEN, generator=generator)
    answers[0, 0, 0] = -0.0
    host, stream = (
        [
            SlotView(torch.randint(120, (layout.nbytes,), dtype=torch.uint8), layout)
            for _ in range(n)
        ]
        for n in [instances * tp] * 2
    )
    for j, of_instance in enumerate(plan.of_instances()):
        answer = answers[j][of_instance]
        for views, shared in ((host, len(answer)), (stream, rows)):
            for rank, (start, end) in enumerate(row_shares(shared, tp)):
                payload, scales = encode_rows(answer[start:end], layout.tag)
                view = views[j * tp + rank]
                view.payload[: len(payload)] = payload
                if scales is not None:
                    view.scales[: len(scales)] = scales
    want = sum_of_shares(host, tp, plan.of_instances(), rows, HIDDEN, torch.float32)
    got = PlacedAnswers(stream, tp).sum(places.of_rows, torch.float32)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("rows", [1, 7])
def test_a_split_needs_no_look_at_the_data(rows):
    """Meta tensors have no data, so any shape that depends on it raises."""
    splitter = StreamSplitter((0, 2, 4), 1, torch.device("cpu"))
    splitter._instance_of = splitter._instance_of.to("meta")
    splitter._sent = splitter._sent.to("meta")
    slots = torch.zeros((rows, 3), dtype=torch.int32, device="meta")
    places = splitter.places(slots)
    assert places.rows.shape == places.of_rows.shape == (2, rows)
    assert places.counts.shape == (2,)
