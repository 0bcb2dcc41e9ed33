"""Rung 5: kernels that read rows from slots, sum answers, and run around an attention layer's
projections, on the emulator, compared with numpy."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from kernel_run import Runner

from afd.schedule import row_shares
from afd.wire import codecs
from afd.wire.layout import Tag, layouts

FP8 = {"gfx942": Tag.E4M3FNUZ, "gfx950": Tag.E4M3FN}
BF16 = ml_dtypes.bfloat16
ORDER = (2, 0, 3)
"""Slots of the three messages. The kernels get the address of the first one."""


def far(stride: int) -> list[tuple[str, int]]:
    """Returns the kernel arguments: distances of the other slots from the first, in 16 bytes."""
    return [("i", (slot - ORDER[0]) * stride // 16) for slot in (*ORDER[1:], *[ORDER[0]] * 5)]


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("wire", ["fp8", "exact"])
def test_rows_of_several_messages(compiled, arch, wire):
    """The second message has no rows; the third was not sent, so its rows are masked."""
    hidden, counts = 384, (5, 0, 7)
    layout, _ = layouts(wire, "bfloat16", 8, hidden, 3, "e4m3fn")
    memory = np.random.default_rng(0).integers(0, 256, (4, layout.nbytes)).astype(np.uint8)
    spans = [
        (0, layout.row_bytes),
        (layout.scales_offset, layout.scale_row_bytes or 1),
        (layout.ids_offset, 12),
        (layout.weights_offset, 12),
    ]
    outputs = [np.full((12, size), 7, np.uint8) for _, size in spans]
    want = [
        np.concatenate(
            [
                memory[slot, at : at + rows * size].reshape(rows, size)
                for slot, rows in zip(ORDER, counts, strict=True)
            ]
        )
        for at, size in spans
    ]
    want[2][5:] = 0xFF  # the second and third message are masked
    if not layout.scale_columns:
        want[1][:] = 7
    begins = [("i", n) for n in (5, 5, 0, 0, 0, 0, 0)]
    words = [("i", 0b110), ("i", layout.row_bytes), ("i", layout.scale_row_bytes)]
    run = Runner(compiled, arch)
    got = run.on_parts(
        "take_rows" if layout.scale_columns else "take_rows[unscaled]",
        memory,
        [ORDER[0] * layout.nbytes + at for at, _ in spans],
        outputs,
        [*far(layout.nbytes), *begins, *words],
        (12,),
    )
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("wire", ["fp8", "exact"])
@pytest.mark.parametrize("tp", [1, 3])
def test_rows_of_a_bucket(compiled, arch, wire, tp):
    """Three messages of 8 rows at most, the second of which was not sent."""
    hidden, bucket, counts = 384, 8, np.array([7, 0, 8], np.int32)
    layout, _ = layouts(wire, "bfloat16", 8, hidden, 3, "e4m3fn")
    memory = np.random.default_rng(0).integers(0, 256, (3, layout.nbytes)).astype(np.uint8)
    spans = [
        (0, layout.row_bytes),
        (layout.scales_offset, layout.scale_row_bytes or 1),
        (layout.ids_offset, 12),
        (layout.weights_offset, 12),
    ]
    outputs = [np.full((24, size), 7, np.uint8) for _, size in spans]
    want = [np.zeros((24, size), np.uint8) for _, size in spans]
    want[2][:] = 0xFF
    for i, count in enumerate(counts.tolist()):
        for (begin, end), (place, _) in zip(
            row_shares(count, tp), row_shares(bucket, tp), strict=True
        ):
            to = i * bucket + place
            for out, (at, size) in zip(want, spans, strict=True):
                sent = memory[i, at : at + 8 * size].reshape(8, size)
                out[to : to + end - begin] = sent[begin:end]
    if not layout.scale_columns:
        want[1][:] = 7
    words = [layout.nbytes // 16, bucket, tp, layout.row_bytes, layout.scale_row_bytes]
    got = Runner(compiled, arch).on_parts(
        "take_bucket" if layout.scale_columns else "take_bucket[unscaled]",
        memory,
        [at for at, _ in spans],
        [*outputs, counts],
        [("i", word) for word in words],
        (24,),
    )
    for mine, theirs in zip(got, want, strict=False):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_sums_of_answers(compiled, arch, form):
    """Two blocks of columns, the second one partial; a NaN propagates."""
    rows, hidden, tag = 3, 1280, FP8[arch]
    name = "e4m3fnuz" if tag == Tag.E4M3FNUZ else "e4m3fn"
    wire = "exact" if form == "bf16" else "mxfp4"
    _, layout = layouts(wire, "bfloat16", 4, hidden, 3, name)
    memory = np.zeros((4, layout.nbytes), np.uint8)
    x = np.random.default_rng(1).standard_normal((3, rows, hidden)).astype(BF16)
    x[1, 2, 5] = np.nan
    values = x.astype(np.float32)
    for i, slot in enumerate(ORDER):
        payload, scales = x[i].view(np.uint8), np.zeros(0, np.uint8)
        if form == "fp8":
            codes, found = codecs.quantise_fp8(values[i], tag)
            values[i] = codecs.dequantise_fp8(codes, found, tag)
            payload, scales = codes.view(np.uint8), found.view(np.uint8)
        memory[slot, : payload.size] = payload.reshape(-1)
        at = layout.scales_offset
        memory[slot, at : at + scales.size] = scales.reshape(-1)
    first = ORDER[0] * layout.nbytes
    (got,) = Runner(compiled, arch).on_parts(
        f"sum_messages[{form}]",
        memory,
        [first, first + (layout.scales_offset if form == "fp8" else 0)],
        [np.zeros((rows, hidden), BF16)],
        [*far(layout.nbytes), ("i", hidden)],
        (rows, 2),
    )
    want = (values[0] + values[1] + values[2]).astype(BF16)
    assert (np.isnan(got.astype(np.float32)) == np.isnan(want.astype(np.float32))).all()
    fine = ~np.isnan(want.astype(np.float32))
    if form == "bf16":
        assert (got.view(np.uint16) == want.view(np.uint16))[fine].all()
    else:  # a fused multiply-add may round product and sum together
        close = np.abs(got.astype(np.float32) - want.astype(np.float32))[fine]
        assert (close <= 2**-7 * np.abs(want.astype(np.float32))[fine] + 1e-6).all()


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def same_within_a_code(codes, scales, want, tag) -> None:
    """Asserts that FP8 rows, one scale each, differ by at most one step of the largest code."""
    largest = codecs.FP8_MAX[tag]
    np.testing.assert_allclose(scales, np.abs(want).max(-1) / largest, rtol=1e-5)
    ones = np.ones((len(codes), codes.shape[1] // 128), np.float32)
    got = codecs.dequantise_fp8(codes, ones, tag) * scales[:, None]
    assert (np.abs(got - want) <= np.abs(want) * 2**-3 + scales[:, None] * 2**-6).all()
    assert np.abs(got - want).mean() <= 2**-5 * np.abs(want).mean()


@pytest.mark.parametrize("arch", FP8)
def test_answers_are_summed_normalised_and_quantised(compiled, arch):
    rows, hidden, tag, eps = 3, 640, FP8[arch], 1e-5
    rng = np.random.default_rng(2)
    memory = rng.standard_normal((4, rows, hidden)).astype(BF16)
    residual, weight = (rng.standard_normal(n).astype(BF16) for n in ((rows, hidden), hidden))
    x = memory[2].astype(np.float32) + memory[0].astype(np.float32) + residual.astype(np.float32)
    arrays = [residual, weight, np.zeros((rows, hidden), np.uint8), np.zeros(rows, np.float32)]
    after, _, codes, scales = Runner(compiled, arch).on_parts(
        "sum_norm_quantise",
        memory,
        [2 * memory[0].nbytes],
        arrays,
        [*far(memory[0].nbytes), ("i", hidden), ("f", eps)],
        (rows,),
    )
    assert (after.view(np.uint16) == x.astype(BF16).view(np.uint16)).all()
    same_within_a_code(codes, scales, normed(x, weight, eps), tag)


@pytest.mark.parametrize("arch", FP8)
def test_a_product_is_added_and_normalised(compiled, arch):
    rows, hidden, eps, rng = 3, 640, 1e-5, np.random.default_rng(5)
    product, residual = (rng.standard_normal((rows, hidden)).astype(BF16) for _ in range(2))
    weight = rng.standard_normal(hidden).astype(BF16)
    of_rows, of_columns = (rng.random(n).astype(np.float32) for n in (rows, hidden))
    arrays = [product, of_rows, of_columns, residual, weight, np.zeros_like(product)]
    after, out = Runner(compiled, arch).in_order(
        "add_norm", arrays, [3, 5], [("i", hidden), ("f", eps)], (rows,)
    )
    x = residual.astype(np.float64) + product.astype(np.float64) * of_columns * of_rows[:, None]
    for got, want in ((after, x), (out, normed(x, weight, eps))):
        assert (np.abs(got.astype(np.float64) - want) <= np.abs(want) * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("arch", FP8)
def test_rows_are_quantised(compiled, arch):
    """Rows include one of zeros, one with a NaN, one with an infinity."""
    rows, columns, tag, rng = 4, 640, FP8[arch], np.random.default_rng(6)
    x = rng.standard_normal((rows, columns)).astype(BF16)
    x[1], x[2, 7], x[3, 8] = 0, np.nan, np.inf
    outputs = [np.full((rows, columns), 7, np.uint8), np.zeros(rows, np.float32)]
    codes, scales = Runner(compiled, arch)("quantise_rows", [x], outputs, [("i", columns)], (rows,))
    same_within_a_code(codes[:1], scales[:1], x[:1].astype(np.float64), tag)
    assert (codes[1] & 0x7F == 0).all() and np.isfinite(scales[1])
    assert np.isnan(scales[2:]).all()


def turned(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Returns x float64 [.., heads, width] rotated by cos_sin [.., 1, width]."""
    (a, b), (cos, sin) = np.split(x, 2, -1), np.split(cos_sin.astype(np.float64), 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_keys_and_queries_are_rotated(compiled, arch, form):
    """Includes a row without a cache slot, a value beyond FP8's range, and a NaN."""
    rows, low, heads, width, page, tag, eps = 5, 256, 2, 128, 16, FP8[arch], 1e-5
    rng, run = np.random.default_rng(3), Runner(compiled, arch)
    qkv = rng.standard_normal((rows, low + 2 * heads * width)).astype(BF16)
    qkv[1, -1], qkv[2, -1] = 1e6, np.nan
    weight = rng.standard_normal(low).astype(BF16)
    of_rows, of_columns = (rng.random(n).astype(np.float32) + 0.5 for n in qkv.shape)
    cos_sin = rng.uniform(-1, 1, (40, width)).astype(BF16)
    positions = rng.integers(0, 40, rows)
    slots = np.array([17, 3, 40, -1, 16])
    scales = [np.array([s], np.float32) for s in (0.5, 0.25)]
    kind = np.uint8 if form == "fp8" else BF16
    cache = [np.zeros((3 * page, heads, width), kind) for _ in range(2)]
    arrays = [qkv, of_rows, of_columns, weight]
    arrays += [
        np.zeros((rows, low), np.uint8),
        np.zeros(rows, np.float32),
        cos_sin,
        positions,
        slots,
        *cache,
        *scales,
    ]
    strides = [page * heads * width, heads * width, width]
    sizes = [("i", n) for n in (low, page, *strides, heads)]
    codes, norms, keys, values = run.in_order(
        f"norm_store[{form}]", arrays, [4, 5, 9, 10], [*sizes, ("f", eps)], (rows, 1 + heads)
    )
    qkv = qkv.astype(np.float64) * of_rows[:, None] * of_columns
    same_within_a_code(codes, norms, normed(qkv[:, :low], weight, eps), tag)
    k, v = (
        qkv[:, low + i * heads * width :][:, : heads * width].reshape(rows, heads, width)
        for i in range(2)
    )
    k = turned(k.astype(np.float64), cos_sin[positions][:, None])
    largest = codecs.FP8_MAX[tag]

    def stored(x: np.ndarray) -> np.ndarray:
        if form == "bf16":
            return x.astype(np.float64)
        flat = x.reshape(-1, width)
        ones = np.ones((len(flat), 1), np.float32)
        return codecs.dequantise_fp8(flat, ones, tag).reshape(x.shape).astype(np.float64)

    for got, x, scale in ((keys, k, 0.5), (values, v.astype(np.float64), 0.25)):
        got, want = stored(got), np.zeros((3 * page, heads, width))
        x = np.clip(x / scale, -largest, largest) if form == "fp8" else x
        want[slots[slots >= 0]] = x[slots >= 0]
        nan = np.isnan(want)
        assert (np.isnan(got) == nan).all()
        step = 2**-3 if form == "fp8" else 2**-7
        assert (np.abs(got - want) <= np.abs(want) * step + 2**-6)[~nan].all()
    q = rng.standard_normal((rows, 8 * width)).astype(BF16)
    of_columns = rng.random(8 * width).astype(np.float32) + 0.5
    arrays = [q, of_rows, of_columns, cos_sin, positions]
    arrays += [np.zeros((rows, 8 * width), kind), scales[0]]
    (got,) = run.in_order(f"rope_quantise[{form}]", arrays, [5], [("i", 8)], (rows, 2))
    q = q.astype(np.float64) * of_rows[:, None] * of_columns
    want = turned(q.reshape(rows, 8, width), cos_sin[positions][:, None])
    want = want / 0.5 if form == "fp8" else want
    got = stored(got.reshape(rows, 8, width))
    step = 2**-3 if form == "fp8" else 2**-7
    assert (np.abs(got - want) <= np.abs(want) * step + 2**-6).all()


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("copies", [1, 3])
def test_expert_ids_are_mapped_to_slots(compiled, arch, copies):
    """More than one block of pairs, and masked pairs; the row number selects the expert's copy."""
    rows, experts, first = 100, 9, 2
    rng = np.random.default_rng(4)
    ids = rng.integers(-1, experts, (rows, 3)).astype(np.int32)
    table = rng.integers(0, 99, (experts + 1, copies)).astype(np.int32)
    count = rng.integers(1, copies + 1, experts + 1).astype(np.int32)
    table[experts], count[experts] = -1, 1
    picked = (np.arange(rows)[:, None] + first) % count[ids]  # id -1 indexes the last entry
    out = np.full((rows, 3), 7, np.int32)
    sizes = [("i", rows * 3), ("i", experts), ("i", first)]
    (got,) = Runner(compiled, arch)(
        f"expert_slots[{copies}]", [ids, table, count], [out], sizes, (2,)
    )
    np.testing.assert_array_equal(got, table[ids, picked])
