"""Rung 5: rows out of their slots, sums of answers, and what stands around an attention layer's
projections, run on the emulator and compared with numpy."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from kernel_run import Runner

from afd.wire import codecs
from afd.wire.layout import Tag, layouts

FP8 = {"gfx942": Tag.E4M3FNUZ, "gfx950": Tag.E4M3FN}
BF16 = ml_dtypes.bfloat16
ORDER = (2, 0, 3)
"""Slots of the three messages, the first of which the kernels are given."""


def far(stride: int) -> list[tuple[str, int]]:
    """How far the others lie from the first, as the kernels are told."""
    return [("i", (slot - ORDER[0]) * stride // 16) for slot in (*ORDER[1:], *[ORDER[0]] * 5)]


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("wire", ["fp8", "exact"])
def test_rows_of_several_messages(compiled, arch, wire):
    """One of them without rows, one that nobody sent."""
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
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_sums_of_answers(compiled, arch, form):
    """Two blocks of columns, the second partly outside; a NaN surfaces."""
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
    else:  # a product may be rounded with the sum
        close = np.abs(got.astype(np.float32) - want.astype(np.float32))[fine]
        assert (close <= 2**-7 * np.abs(want.astype(np.float32))[fine] + 1e-6).all()


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def same_within_a_code(codes, scales, want, tag) -> None:
    """FP8 rows with a scale each: off by at most a step of the largest code."""
    largest = codecs.FP8_MAX[tag]
    np.testing.assert_allclose(scales, np.abs(want).max(-1) / largest, rtol=1e-5)
    ones = np.ones((len(codes), codes.shape[1] // 128), np.float32)
    got = codecs.dequantise_fp8(codes, ones, tag) * scales[:, None]
    assert (np.abs(got - want) <= np.abs(want) * 2**-3 + scales[:, None] * 2**-6).all()
    assert np.abs(got - want).mean() <= 2**-5 * np.abs(want).mean()


@pytest.mark.parametrize("arch", FP8)
def test_answers_are_added_normed_and_quantised(compiled, arch):
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


def turned(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """x float64 [.., heads, width], rotated; cos_sin [.., 1, width]."""
    (a, b), (cos, sin) = np.split(x, 2, -1), np.split(cos_sin.astype(np.float64), 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("arch", FP8)
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_keys_and_queries_are_rotated(compiled, arch, form):
    """A row that goes nowhere, a value beyond what FP8 holds, a NaN."""
    rows, low, heads, width, page, tag, eps = 5, 256, 2, 128, 16, FP8[arch], 1e-5
    rng, run = np.random.default_rng(3), Runner(compiled, arch)
    qkv = rng.standard_normal((rows, low + 2 * heads * width)).astype(BF16)
    qkv[1, -1], qkv[2, -1] = 1e6, np.nan
    weight = rng.standard_normal(low).astype(BF16)
    cos_sin = rng.uniform(-1, 1, (40, width)).astype(BF16)
    positions = rng.integers(0, 40, rows)
    slots = np.array([17, 3, 40, -1, 16])
    scales = [np.array([s], np.float32) for s in (0.5, 0.25)]
    kind = np.uint8 if form == "fp8" else BF16
    cache = [np.zeros((3 * page, heads, width), kind) for _ in range(2)]
    arrays = [qkv, weight, np.zeros((rows, low), np.uint8), np.zeros(rows, np.float32)]
    arrays += [cos_sin, positions, slots, *cache, *scales]
    strides = [page * heads * width, heads * width, width]
    sizes = [("i", n) for n in (qkv.shape[1], low, page, *strides, heads)]
    codes, norms, keys, values = run.in_order(
        f"norm_store[{form}]", arrays, [2, 3, 7, 8], [*sizes, ("f", eps)], (rows, 1 + heads)
    )
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
    arrays = [q, cos_sin, positions, np.zeros((rows, 8 * width), kind), scales[0]]
    (got,) = run.in_order(f"rope_quantise[{form}]", arrays, [3], [("i", 8)], (rows, 2))
    want = turned(q.reshape(rows, 8, width).astype(np.float64), cos_sin[positions][:, None])
    want = want / 0.5 if form == "fp8" else want
    got = stored(got.reshape(rows, 8, width))
    step = 2**-3 if form == "fp8" else 2**-7
    assert (np.abs(got - want) <= np.abs(want) * step + 2**-6).all()
