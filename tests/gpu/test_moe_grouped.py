"""The gate-up kernel on a Hopper GPU, compared with float32 on the same codes."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from afd.wire.layout import Tag  # noqa: E402
from afd.wire.rows_torch import EncodedRows  # noqa: E402
from ffn_worker.moe import reference  # noqa: E402
from ffn_worker.moe.deep_gemm import SlotLayout  # noqa: E402
from ffn_worker.moe.grouped import cannot_compile, gate_up  # noqa: E402
from ffn_worker.moe.quantise import Weight, in_scheme  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402
from ffn_worker.moe.sorting import capacity, place_pairs, place_pairs_on_gpu  # noqa: E402

REASON = cannot_compile()
if REASON is None and torch.cuda.get_device_capability()[0] != 9:
    REASON = "needs an NVIDIA Hopper GPU"
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def weights(experts, width, hidden):
    torch.manual_seed(width)
    drawn = torch.randn(experts, 2 * width, hidden, device=CUDA) / hidden**0.5
    return in_scheme(Weight.of(drawn.bfloat16()), Scheme.FP8_BLOCK, Tag.E4M3FN, torch.bfloat16)


def rows_of(count, hidden):
    x = torch.randn(count, hidden).bfloat16()
    rows = EncodedRows.of(x * torch.rand(count, 1) * 4, Tag.E4M3FN)
    return EncodedRows(rows.tag, rows.payload.to(CUDA), rows.scales.to(CUDA))


def checked(weight, ids, tile=128, start=0):
    experts, columns, hidden = weight.shape
    (count, top_k), device_ids = ids.shape, ids.to(CUDA)
    rows = rows_of(count, hidden)
    placed = place_pairs_on_gpu(device_ids, start, start + experts, tile)
    layout = SlotLayout(tile, tile, capacity(ids.numel(), experts, tile))
    # The next allocation reuses this memory, so values that the kernel does not write are NaN.
    poison = torch.full((layout.room * columns,), 0xFF, dtype=torch.uint8, device=CUDA)
    del poison
    got = gate_up(rows, weight, placed, top_k, layout)
    placed = place_pairs(ids, start, start + experts, tile)
    want = reference.gate_up(rows, weight, placed, top_k, tile)
    here = ~want.isnan().any(1)
    decoded = got.codes.float() * got.scales.t().repeat_interleave(128, 1)
    error = (decoded[here] - want[here]).abs()
    # Rounding to a code: half of its last bit, 1/16 of the value. Sums: 1% of the block's largest.
    largest = 448 * got.scales.t().repeat_interleave(128, 1)[here]
    assert (error <= 0.07 * want[here].abs() + 0.01 * largest).all(), float(error.max())


@pytest.mark.parametrize(("width", "hidden"), [(128, 128), (384, 512), (640, 7168), (128, 16512)])
@pytest.mark.parametrize("seed", range(3))
def test_draws(width, hidden, seed):
    torch.manual_seed(seed)
    experts, rows = ((24, 2048), (5, 700), (40, 33))[seed]
    if hidden > 7168:
        experts = 3
    ids = torch.rand(rows, 48).topk(3).indices.int()
    checked(weights(experts, width, hidden), ids, (128, 64, 8)[seed], start=seed)


@pytest.mark.parametrize("hidden", [640, 2304])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 96, 97, 128, 129, 144, 145, 160, 289, 1000])
def test_rows_of_one_expert(count, hidden):
    """One expert has most rows, others few or none. From 97 rows, rows are wgmma's M dimension."""
    torch.manual_seed(count)
    ids = torch.full((max(count, 40), 1), -1, dtype=torch.int32)
    ids[torch.randperm(len(ids))[:count]] = 2
    ids[:7][ids[:7] == -1] = 3
    checked(weights(5, 256, hidden), ids)


@pytest.mark.parametrize("hidden", [512, 2304])
@pytest.mark.parametrize("count", [100, 144, 145, 160, 161, 300])
def test_more_tiles_than_multiprocessors(count, hidden):
    torch.manual_seed(count)
    ids = torch.arange(24, dtype=torch.int32).repeat(count)[:, None]
    checked(weights(24, 768, hidden), ids[torch.randperm(len(ids))])


def test_no_pairs_and_values_that_are_not_finite():
    weight = weights(3, 128, 256)
    checked(weight, torch.full((9, 2), -1, dtype=torch.int32))
    rows, ids = rows_of(40, 256), torch.zeros(40, 1, dtype=torch.int32, device=CUDA)
    rows.scales[7, 1] = torch.nan
    placed = place_pairs_on_gpu(ids, 0, 3, 64)
    got = gate_up(rows, weight, placed, 1, SlotLayout(64, 64, capacity(40, 3, 64)))
    decoded = got.codes.float() * got.scales.t().repeat_interleave(128, 1)
    assert decoded[7].isnan().all() and decoded[:40].isnan().any(1).sum() == 1
