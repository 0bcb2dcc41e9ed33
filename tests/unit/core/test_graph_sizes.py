"""Which sizes of steps are captured."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from afd.graph_sizes import MOST_ROWS, GraphSizes, captured_rows
from afd.schedule import row_shares, split_rows
from ffn_worker.pool.order_format import Part
from ffn_worker.row_table import RowTable


@given(st.data())
def test_every_step_that_can_be_announced_has_a_graph(data):
    max_requests, min_rows = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 40))
    each = data.draw(st.integers(1, 8))  # the last token of a request, and drafts
    rows = captured_rows(max_requests, each)
    sizes = GraphSizes.of(rows, 3, min_rows)
    assert rows[-1] == min(max_requests, MOST_ROWS // each) * each
    assert list(rows) == sorted(set(rows)) and not any(size % each for size in rows)
    for depth, buckets in enumerate(sizes.buckets, start=1):
        for size in rows:
            if depth > 1 and size // depth < min_rows:
                continue
            most = max(split_rows(size, depth))
            bucket = sizes.bucket_of([(size, depth)])
            assert bucket in buckets and bucket >= most
            # The sizes below 64 are 8 apart, so that small buckets are up to twice as large.
            assert bucket <= max(1.25 * most, most, min_rows) + 8 * each
    assert len(sizes.all()) == sum(map(len, sizes.buckets)) == len(set(sizes.all()))
    assert len(sizes.all()) <= 24 * 3
    for micro_batch, largest in enumerate(sizes.largest):
        assert all(b <= largest for buckets in sizes.buckets[micro_batch:] for b in buckets)


def test_the_bucket_has_room_for_everyone_in_the_step():
    sizes = GraphSizes.of(captured_rows(64), 3, 4)
    assert sizes.buckets == (
        (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64),
        (4, 8, 16, 24, 32),
        (4, 8, 16, 24),
    )
    assert sizes.bucket_of([(64, 3), (8, 1)]) == 24
    assert sizes.bucket_of([(64, 3), (30, 1)]) == 0, "more than a step of depth 3 has"
    assert sizes.bucket_of([(3, 1), (5, 1), (1, 1)]) == 8
    assert GraphSizes.of((), 3, 4).bucket_of([(1, 1)]) == 0


@given(st.data())
def test_the_table_of_a_step(data):
    instances, tp = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    here = data.draw(st.sets(st.integers(0, instances - 1), min_size=1))
    parts = [
        Part(i, 1, data.draw(st.integers(3, 99)), data.draw(st.integers(1, 3)), 0, 0, 0)
        for i in sorted(here)
    ]
    present = [data.draw(st.booleans()) for _ in parts]
    for rank in range(tp):
        table = RowTable(instances, 3, 99, torch.device("cpu"), rank=rank, tp=tp)
        for _ in range(2):  # nothing of the last step is left
            table.fill(parts, [object() if is_here else None for is_here in present])
        table.load()
        want = np.zeros((instances, 3), np.int32)
        for part, is_here in zip(parts, present, strict=True):
            if is_here:
                want[part.attention, : part.depth] = split_rows(part.rows, part.depth)
        assert np.array_equal(np.stack([table.of(mb).numpy() for mb in range(3)], 1), want)
        assert table.rows_of_step() == want.sum(axis=0).tolist()
        assert np.array_equal(table.depths, (want > 0).sum(axis=1))
        answers = [
            [end - start for start, end in [row_shares(int(n), tp)[rank]]] for n in want.flat
        ]
        assert table.answers.tolist() == np.reshape(answers, want.shape).tolist()
