"""The kernels of both bfloat16 products on a Hopper GPU, compared with float32."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from afd.wire.layout import Tag  # noqa: E402
from afd.wire.rows_torch import EncodedRows  # noqa: E402
from ffn_worker.moe import grouped_plain, reference  # noqa: E402
from ffn_worker.moe.deep_gemm import Operand, SlotLayout  # noqa: E402
from ffn_worker.moe.grouped import cannot_compile  # noqa: E402
from ffn_worker.moe.quantise import Weight  # noqa: E402
from ffn_worker.moe.sorting import capacity, place_pairs, place_pairs_on_gpu  # noqa: E402

REASON = cannot_compile()
if REASON is None and torch.cuda.get_device_capability()[0] != 9:
    REASON = "needs an NVIDIA Hopper GPU"
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def weight(experts, columns, k):
    return Weight.of((torch.randn(experts, columns, k, device=CUDA) / k**0.5).bfloat16())


def close(got, want):
    """Asserts equality up to rounding: results are rounded once, the reference adds in another
    order and also rounds gate and up."""
    here = ~want.isnan().any(1)
    got, want = got[here].float(), want[here]
    error = (got - want).abs()
    most = want.abs().amax(1, keepdim=True) if len(want) else want
    assert (error <= 0.01 * want.abs() + 0.01 * most).all(), float(error.max())


def poisoned(*shape):
    """Fills memory that the next allocation reuses: values that a kernel does not write are NaN."""
    torch.full(shape, torch.nan, dtype=torch.bfloat16, device=CUDA)


def checked(experts, width, hidden, ids, tile=128, start=0):
    (count, top_k), device_ids = ids.shape, ids.to(CUDA)
    w13, w2 = weight(experts, 2 * width, hidden), weight(experts, hidden, width)
    rows = EncodedRows.of(torch.randn(count, hidden, device=CUDA).bfloat16())
    placed = place_pairs_on_gpu(device_ids, start, start + experts, tile)
    layout = SlotLayout(tile, tile, capacity(ids.numel(), experts, tile))
    poisoned(layout.room, width)
    a = grouped_plain.gate_up(rows, w13, placed, top_k, layout)
    want = place_pairs(ids, start, start + experts, tile)
    close(a.codes, reference.gate_up(rows, w13, want, top_k, tile))
    # Slots without a pair hold NaN, which must not affect other rows.
    given = torch.full_like(a.codes, torch.nan)
    begin = 0
    for end in want.ends.tolist():
        given[begin:end] = a.codes[begin:end]
        begin = -(-end // tile) * tile
    poisoned(layout.room, hidden)
    y = grouped_plain.down(Operand(given), w2, placed, layout)
    close(y, reference.down(given, w2, want, tile))


@pytest.mark.parametrize(("width", "hidden"), [(128, 128), (384, 512), (640, 7168), (768, 2048)])
@pytest.mark.parametrize("seed", range(3))
def test_draws(width, hidden, seed):
    torch.manual_seed(seed)
    experts, rows = ((24, 2048), (5, 700), (40, 33))[seed]
    ids = torch.rand(rows, 48).topk(3).indices.int()
    checked(experts, width, hidden, ids, (128, 64, 8)[seed], start=seed)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 100, 191, 192, 193, 384, 385, 577, 1000])
def test_rows_of_one_expert(count):
    """One expert has most rows, others few or none."""
    torch.manual_seed(count)
    ids = torch.full((max(count, 40), 1), -1, dtype=torch.int32)
    ids[torch.randperm(len(ids))[:count]] = 2
    ids[:7][ids[:7] == -1] = 3
    checked(5, 256, 640, ids)


def test_skewed_routing_of_many_experts():
    torch.manual_seed(0)
    chance = (torch.rand(200) ** 4 + 1e-4).expand(3000, -1)
    checked(200, 384, 512, torch.multinomial(chance, 8).int())


def test_no_pairs():
    checked(3, 128, 256, torch.full((9, 2), -1, dtype=torch.int32))


def test_values_that_are_not_finite_stay_in_their_row():
    w13, w2 = weight(3, 256, 256), weight(3, 256, 128)
    x = torch.randn(40, 256, device=CUDA).bfloat16()
    x[7, 100] = torch.inf
    ids, tile = torch.zeros(40, 1, dtype=torch.int32, device=CUDA), 64
    placed, layout = (
        place_pairs_on_gpu(ids, 0, 3, tile),
        SlotLayout(tile, tile, capacity(40, 3, tile)),
    )
    a = grouped_plain.gate_up(EncodedRows(Tag.BFLOAT16, x, None), w13, placed, 1, layout)
    y = grouped_plain.down(a, w2, placed, layout)
    for made in (a.codes, y):
        broken = ~made[:40].isfinite().all(1)
        assert broken[7] and broken.sum() == 1


def test_replays_of_a_graph_agree():
    torch.manual_seed(1)
    w13, w2 = weight(16, 768, 512), weight(16, 512, 384)
    rows = EncodedRows.of(torch.randn(900, 512, device=CUDA).bfloat16())
    ids, tile = torch.rand(900, 16).topk(4).indices.int().to(CUDA), 128
    layout = SlotLayout(tile, tile, capacity(3600, 16, tile))

    def run():
        placed = place_pairs_on_gpu(ids, 0, 16, tile)
        a = grouped_plain.gate_up(rows, w13, placed, 4, layout)
        return grouped_plain.down(a, w2, placed, layout), placed.slots

    want, slots = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, _ = run()
    for _ in range(20):
        graph.replay()
        assert torch.equal(got[slots.long()], want[slots.long()])
