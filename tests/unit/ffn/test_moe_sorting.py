"""Sorted pairs equal those of a plain loop, on random and extreme distributions."""

import pytest

torch = pytest.importorskip("torch")

from ffn_worker.moe.sorting import capacity, chunking, place_pairs, sort_pairs  # noqa: E402


def by_hand(ids, start, end, block):
    flat = ids.flatten().tolist()
    pairs, experts = [], []
    for expert in range(start, end):
        mine = [i for i, e in enumerate(flat) if e == expert]
        mine += [len(flat)] * (-len(mine) % block)
        pairs += mine
        experts += [expert - start] * (len(mine) // block)
    return pairs, experts


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("experts", [(0, 8), (2, 5), (7, 8)])
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_equals_a_plain_loop(rows, experts, block):
    torch.manual_seed(rows)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(rows)]).int()
    ids[0, 1] = -1
    check(ids, experts, block)


@pytest.mark.parametrize("ids", [[[3, 3]] * 9, [[-1, -5]] * 4, [[0, 7]] * 5])
def test_extreme_distributions(ids):
    check(torch.tensor(ids, dtype=torch.int32), (0, 8), 4)


def check(ids, experts, block):
    got = sort_pairs(ids, *experts, block)
    pairs, owners = by_hand(ids, *experts, block)
    used = int(got.used)
    assert (
        used
        == len(pairs)
        <= len(got.pairs)
        == capacity(ids.numel(), experts[1] - experts[0], block)
    )
    assert got.pairs[:used].tolist() == pairs
    assert (got.pairs[used:] == ids.numel()).all()
    assert got.experts[: used // block].tolist() == owners
    assert got.experts.dtype == got.pairs.dtype == got.used.dtype == torch.int32
    assert (got.experts >= 0).all() and (got.experts < experts[1] - experts[0]).all()


def test_the_shared_experts_pairs_come_last():
    ids = torch.tensor([[1, 5], [-1, 2], [4, 3]], dtype=torch.int32)
    got = sort_pairs(ids, 2, 5, 2, shared=True)
    used = int(got.used)
    # Pair number = row * 3 + k; k = 2 is the shared expert's pair.
    assert got.pairs[:used].tolist() == [4, 9, 7, 9, 6, 9, 2, 5, 8, 9]
    assert got.experts[: used // 2].tolist() == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("experts", [(0, 8), (2, 5)])
def test_slots_are_the_inverse_of_the_order(experts):
    torch.manual_seed(3)
    ids = torch.randint(-1, 8, (21, 3)).int()
    ids[ids == 4] = 3  # no row selected expert 4
    order = sort_pairs(ids, *experts, 4)
    placed = place_pairs(ids, *experts, 4)
    pairs, entries = 21 * 3, order.pairs[: int(order.used)].tolist()
    want = [entries.index(pair) if pair in entries else -1 for pair in range(pairs)]
    assert placed.slots.tolist() == want and placed.slots.dtype == torch.int32
    begin = 0
    for owner, end in enumerate(placed.ends.tolist()):
        run = entries[begin:end]
        assert all(pair < pairs for pair in run) and set(
            order.experts[begin // 4 : -(-end // 4)].tolist()
        ) <= {owner}
        begin = -(-end // 4) * 4
        assert all(pair == pairs for pair in entries[end:begin])
    assert begin == len(entries)


def test_a_batch_is_cut_into_32_chunks_up_to_the_largest_chunk():
    assert [chunking(n) for n in (1, 2048, 2049, 8192, 8193, 10**6)] == [
        (64, 4), (64, 4), (128, 4), (256, 4), (512, 8), (512, 8),
    ]  # fmt: skip
