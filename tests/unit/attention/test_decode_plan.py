"""The launch plan of decode attention, and the reference implementation."""

import pytest

from attention_worker.kernels.decode_plan import MAX_SPLITS, plan_decode


@pytest.mark.parametrize(
    ("requests", "splits"), [(1, 64), (8, 33), (32, 8), (64, 4), (128, 2), (256, 1), (1000, 1)]
)
def test_splits_give_at_most_two_programs_per_processor(requests, splits):
    plan = plan_decode(requests, 1, 64, 256, 1, 132)
    assert (plan.splits, plan.block, plan.tile) == (splits, 64, 64)
    assert plan.splits in (1, MAX_SPLITS) or requests * plan.splits <= 2 * 132


def test_a_tile_of_keys_is_at_most_16_kib():
    for dim in (64, 128, 256):
        for element in (1, 2):
            assert plan_decode(1, 1, 8, dim, element, 132).tile * dim * element <= 16384


def test_heads_in_different_tiles_are_separate_programs():
    assert plan_decode(16, 1, 128, 128, 1, 132).splits == 8
    assert plan_decode(16, 8, 4, 128, 1, 132).splits == 2
    assert plan_decode(16, 8, 4, 128, 1, 132).block == 16
    assert plan_decode(0, 1, 64, 256, 1, 132).splits == MAX_SPLITS


def test_reference_equals_plain_attention_over_pages():
    torch = pytest.importorskip("torch")
    from attention_worker.kernels.decode_attention import reference_decode_attention

    torch.manual_seed(0)
    lengths, page, heads, kv_heads, dim = [5, 0, 8], 4, 6, 2, 16
    q = torch.randn(3, heads, dim)
    keys, values = torch.randn(2, 12, page, kv_heads, dim)
    table = torch.randperm(12).view(3, 4).int()
    got = reference_decode_attention(
        q, keys, values, table, torch.tensor(lengths), 0.25, 2.0, 3.0, 5.0
    )
    for request, length in enumerate(lengths):
        k, v = (x[table[request].long()].flatten(0, 1)[:length] for x in (keys, values))
        for head in range(heads):
            shared = head // (heads // kv_heads)
            weights = (q[request, head] @ k[:, shared].T * 0.25 * 6.0).softmax(-1)
            assert torch.allclose(got[request, head], weights @ v[:, shared] * 5.0, atol=1e-5)
