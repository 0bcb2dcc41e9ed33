"""Rung 5: the grouped expert kernels run on the emulator and agree with float64."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from kernel_run import Runner

from afd.wire import codecs
from afd.wire.layout import Tag

ROWS, TOP_K, EXPERTS, HIDDEN, WIDTH = 9, 2, 3, 256, 128
PAIRS = ROWS * TOP_K
FP8 = {"gfx942": Tag.E4M3FNUZ, "gfx950": Tag.E4M3FN}


def quantised(x: np.ndarray, kind: str, tag: Tag) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes, scales and the float64 values that they represent, of rows [n, k]."""
    x = x.astype(np.float32)
    if kind == "fp8":
        codes, scales = codecs.quantise_fp8(x, tag)
        return codes, scales, codecs.dequantise_fp8(codes, scales, tag).astype(np.float64)
    if kind == "mxfp4":
        codes, scales = codecs.quantise_mxfp4(x)
        return codes, scales, codecs.dequantise_mxfp4(codes, scales).astype(np.float64)
    plain = x.astype(ml_dtypes.bfloat16)
    return plain, np.zeros(1, np.float32), plain.astype(np.float64)


def quantised_weight(w: np.ndarray, kind: str, tag: Tag) -> tuple[np.ndarray, ...]:
    """Returns the same for weights [E, N, K]; FP8 has one scale per 128 x 128 block."""
    experts, n, k = w.shape
    if kind != "fp8":
        codes, scales, values = quantised(w.reshape(-1, k), kind, tag)
        return codes, scales, values.reshape(w.shape)
    blocks = w.astype(np.float32).reshape(experts, n // 128, 128, k // 128, 128)
    scales = np.abs(blocks).max(axis=(2, 4)) / np.float32(codecs.FP8_MAX[tag])
    codes = (blocks / scales[:, :, None, :, None]).astype(codecs.FP8_DTYPE[tag])
    values = codes.astype(np.float64) * scales[:, :, None, :, None]
    return codes.view(np.uint8).reshape(w.shape), scales, values.reshape(w.shape)


class Batch:
    """Pairs of nine rows, sorted by expert and padded; expert 2 has no pairs."""

    def __init__(self, block: int) -> None:
        rng = np.random.default_rng(5)
        self.ids = rng.integers(0, 2, (ROWS, TOP_K)).astype(np.int32)
        flat = self.ids.reshape(-1)
        runs = [np.flatnonzero(flat == e) for e in range(2)]
        padded = [np.pad(r, (0, -len(r) % block), constant_values=PAIRS) for r in runs]
        spare = np.full(block, PAIRS)  # a block beyond those in use
        self.pairs = np.concatenate([*padded, spare]).astype(np.int32)
        self.experts = np.array([0, 1, 2], np.int32)
        self.used = np.array([2 * block], np.int32)
        self.x = rng.standard_normal((ROWS, HIDDEN))
        self.w13 = rng.standard_normal((EXPERTS, 2 * WIDTH, HIDDEN)) / HIDDEN**0.5
        self.w2 = rng.standard_normal((EXPERTS, HIDDEN, WIDTH)) / WIDTH**0.5


def launch(runner, name, batch, a, b, c, c_scale, n, k, rows_per, shared=(-1, 0)):
    inputs = [a[0], a[1], b[0], b[1]]
    sorted_pairs = [batch.pairs, batch.experts, batch.used]
    scalars = [("i", n), ("i", k), ("i", PAIRS), ("i", rows_per)]
    scalars += [("i", value) for value in shared]
    blocks = len(batch.experts) * -(-n // 128)
    return runner.in_order(name, [*inputs, c, c_scale, *sorted_pairs], [4, 5], scalars, (blocks,))


def silu_product(x: np.ndarray, w13: np.ndarray, ids: np.ndarray) -> np.ndarray:
    rows = np.repeat(x, TOP_K, axis=0)
    h = np.einsum("pk,pnk->pn", rows, w13[ids.reshape(-1)])
    gate, up = h[:, :WIDTH], h[:, WIDTH:]
    with np.errstate(over="ignore"):  # exp(huge) is infinite, and the quotient zero
        return gate / (1 + np.exp(-gate)) * up


def close(got: np.ndarray, want: np.ndarray, bound: float) -> None:
    error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
    assert error <= bound, error


CASES = [
    ("plain", "plain", 64, ""),
    ("fp8", "fp8", 64, ""),
    ("mxfp4", "mxfp4", 64, ""),
    ("plain", "mxfp4", 64, ""),
    ("fp8", "fp8", 16, ""),
    ("fp8", "fp8", 16, ",swap"),
]
# Error of rounding the result once, relative to its largest value.
ACTIVATION_BOUND = {"plain": 2**-8, "fp8": 2**-4, "mxfp4": 0.26}


@pytest.mark.parametrize(("a", "b", "block", "how"), CASES)
@pytest.mark.parametrize("arch", FP8)
def test_gate_up(compiled, arch, a, b, block, how):
    runner, tag, batch = Runner(compiled, arch), FP8[arch], Batch(block)
    x, w13 = quantised(batch.x, a, tag), quantised_weight(batch.w13, b, tag)
    out, scale, _ = quantised(np.zeros((PAIRS, WIDTH)), a, tag)
    got, got_scale = launch(
        runner, f"gate_up[{a},{b},{block}{how}]", batch, x, w13, out, scale, WIDTH, HIDDEN, TOP_K
    )
    want = silu_product(x[2], w13[2], batch.ids)
    if a == "fp8":
        values = codecs.dequantise_fp8(got, got_scale, tag)
    elif a == "mxfp4":
        values = codecs.dequantise_mxfp4(got, got_scale)
    else:
        values = got
    close(values, want, ACTIVATION_BOUND[a])
    if a != "plain":  # the scales equal those of the exact result, up to its rounding
        _, want_scale, _ = quantised(want, a, tag)
        assert np.isclose(got_scale.astype(float), want_scale, rtol=1e-5).mean() > 0.98


@pytest.mark.parametrize(("a", "b", "block", "how"), CASES)
@pytest.mark.parametrize("arch", FP8)
def test_down(compiled, arch, a, b, block, how):
    runner, tag, batch = Runner(compiled, arch), FP8[arch], Batch(block)
    rng = np.random.default_rng(6)
    act = quantised(rng.standard_normal((PAIRS, WIDTH)), a, tag)
    w2 = quantised_weight(batch.w2, b, tag)
    out, scale, _ = quantised(np.zeros((PAIRS, HIDDEN)), "plain", tag)
    name = f"down[{a},{b},{block}{how}]"
    got, _ = launch(runner, name, batch, act, w2, out, scale, HIDDEN, WIDTH, 1)
    want = np.einsum("pk,pnk->pn", act[2], w2[2][batch.ids.reshape(-1)])
    close(got, want, 2**-8)


@pytest.mark.parametrize("arch", FP8)
def test_a_narrower_shared_expert(compiled, arch):
    """FP8, with expert 1 as a shared expert that has 128 of 256 columns. The kernels must neither
    compute nor read its other columns: there, weights and intermediate memory hold NaN."""
    runner, tag, batch, width = Runner(compiled, arch), FP8[arch], Batch(64), 256
    rng = np.random.default_rng(7)
    nan = {Tag.E4M3FN: 0x7F, Tag.E4M3FNUZ: 0x80}[tag]
    x = quantised(batch.x, "fp8", tag)
    w13 = quantised_weight(rng.standard_normal((EXPERTS, 2 * width, HIDDEN)) / 16, "fp8", tag)
    w2 = quantised_weight(rng.standard_normal((EXPERTS, HIDDEN, width)) / 16, "fp8", tag)
    shared = batch.ids.reshape(-1) == 1
    act, act_scale = np.full((PAIRS, width), nan, np.uint8), np.full((PAIRS, 2), np.nan, "f4")
    w13[0][1, 128:256], w13[0][1, 384:], w2[0][1, :, 128:] = nan, nan, nan
    act, act_scale = launch(
        runner, "gate_up[fp8,fp8,64,shared]", batch, x, w13, act, act_scale, width, HIDDEN, TOP_K,
        shared=(1, 128),
    )  # fmt: skip
    values = codecs.dequantise_fp8(act, act_scale, tag).astype(np.float64)
    rows = np.repeat(x[2], TOP_K, axis=0)
    h = np.einsum("pk,pnk->pn", rows, w13[2][batch.ids.reshape(-1)])
    want = h[:, :width] / (1 + np.exp(-h[:, :width])) * h[:, width:]
    close(values[~shared], want[~shared], ACTIVATION_BOUND["fp8"])
    close(values[shared, :128], want[shared, :128], ACTIVATION_BOUND["fp8"])
    assert np.isnan(values[shared, 128:]).all()
    out = np.zeros((PAIRS, HIDDEN), ml_dtypes.bfloat16)
    got, _ = launch(
        runner, "down[fp8,fp8,64,shared]", batch, (act, act_scale), w2, out,
        np.zeros(1, np.float32), HIDDEN, width, 1, shared=(1, 128),
    )  # fmt: skip
    weights = w2[2][batch.ids.reshape(-1)]
    values[shared, 128:], weights[shared, :, 128:] = 0, 0
    close(got, np.einsum("pk,pnk->pn", values, weights), 2**-8)


def adversarial_rows() -> np.ndarray:
    """Returns nine rows: zeros, huge, tiny, an outlier in its block, ties, and NaN in row 8."""
    x = np.random.default_rng(8).standard_normal((ROWS, HIDDEN))
    x[0], x[1], x[2], x[3, 7] = 0, x[1] * 1e4, x[2] * 1e-3, 3e3
    x[4] = np.tile([-0.25, 0.75, 1.25, 5.0], HIDDEN // 4)
    x[5, :128] = 0
    x[8, 3] = np.nan
    return x


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@pytest.mark.parametrize("arch", FP8)
def test_rows_as_the_wire_brings_them(compiled, arch, kind):
    """Every row equals decoding first, then computing; a NaN stays in its row."""
    runner, tag, batch = Runner(compiled, arch), FP8[arch], Batch(64)
    x, w13 = quantised(adversarial_rows(), kind, tag), quantised_weight(batch.w13, kind, tag)
    out, scale, _ = quantised(np.zeros((PAIRS, WIDTH)), kind, tag)
    name = f"gate_up[{kind},{kind},64]"
    got, got_scale = launch(runner, name, batch, x, w13, out, scale, WIDTH, HIDDEN, TOP_K)
    values = (
        codecs.dequantise_fp8(got, got_scale, tag)
        if kind == "fp8"
        else codecs.dequantise_mxfp4(got, got_scale)
    )
    want = silu_product(x[2], w13[2], batch.ids)
    pairs = np.arange(PAIRS) // TOP_K
    assert np.isnan(values[pairs == 8]).all() and not np.isnan(values[pairs < 8]).any()
    assert (values[pairs == 0] == 0).all()
    for row in range(1, 8):
        close(values[pairs == row], want[pairs == row], ACTIVATION_BOUND[kind])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("arch", FP8)
def test_sorting(compiled, arch, shared):
    """The order equals that of a plain loop; entries beyond its end are not written."""
    runner, suffix, top_k = Runner(compiled, arch), "[shared]" if shared else "", 3 if shared else 8
    rng = np.random.default_rng(9)
    # More chunks and more experts than a program processes in one step.
    rows, start, experts, block, chunk = 70 // (top_k // 3), 4, 37, 16, 8
    ids = rng.integers(-1, 45, (rows, top_k)).astype(np.int32)
    ids[:, 0] = 4
    each, programs = top_k + shared, experts + shared
    pairs = rows * each
    local = np.where((ids >= start) & (ids < start + experts), ids - start, -1)
    if shared:
        local = np.pad(local, ((0, 0), (0, 1)), constant_values=experts)
    runs = [np.flatnonzero(local.reshape(-1) == e) for e in range(programs)]
    sizes = [("i", pairs), ("i", start), ("i", experts)]
    grid, before = (-(-pairs // chunk), -(-programs // 32)), np.arange(experts) + 2**40
    empty = np.full((grid[0], 64), -7, np.int32)
    (counts,) = runner(f"count_pairs{suffix}", [ids], [empty], sizes, grid)
    ends = np.cumsum([len(run) for run in runs])
    assert counts[:, :programs].sum(0).tolist() == np.diff(ends, prepend=0).tolist()
    padded = [np.pad(r, (0, -len(r) % block), constant_values=pairs) for r in runs]
    size = sum(map(len, padded))
    outputs = [before, np.full(size + 64, -7, np.int32), np.full(size // block + 4, -7, np.int32)]
    outputs.append(np.zeros(1, np.int32))
    load, order, owners, used = runner(f"sort_pairs{suffix}", [ids, counts], outputs, sizes, grid)
    assert used[0] == size
    assert (load - before).tolist() == [len(run) for run in runs[:experts]]
    assert order.tolist() == np.concatenate(padded).tolist() + [-7] * 64
    blocks = [len(run) // block for run in padded]
    assert owners.tolist() == np.repeat(np.arange(programs), blocks).tolist() + [-7] * 4


@pytest.mark.parametrize("arch", FP8)
def test_combine_adds_the_shared_expert(compiled, arch):
    rng = np.random.default_rng(2)
    rows, top_k, hidden = 2, 3, 1024
    y = rng.standard_normal((rows, top_k + 1, hidden)).astype(ml_dtypes.bfloat16)
    ids = np.array([[0, 5, 9], [-1, -1, -1]], np.int32)
    y[0, [0, 2]], y[1, :3] = np.nan, np.nan
    weights = rng.random((rows, top_k)).astype(np.float32)
    out = np.zeros((rows, hidden), ml_dtypes.bfloat16)
    scalars = [("i", hidden), ("i", 4), ("i", 8)]
    runner = Runner(compiled, arch)
    arrays = [y.reshape(-1, hidden), ids, weights, out]
    (got,) = runner.in_order("combine[shared]", arrays, [3], scalars, (rows, 1))
    want = y[:, 3].astype(np.float64)
    want[0] += y[0, 1].astype(np.float64) * weights[0, 1]
    close(got, want, 2**-8)


@pytest.mark.parametrize("arch", FP8)
def test_combine(compiled, arch):
    rng = np.random.default_rng(1)
    rows, top_k, hidden = 3, 8, 1280  # a second block of columns, partly masked
    y = rng.standard_normal((rows * top_k, hidden)).astype(ml_dtypes.bfloat16)
    ids = rng.integers(0, 16, (rows, top_k)).astype(np.int32)
    ids[0, 0], ids[1] = -1, 15
    local = (ids >= 4) & (ids < 12)
    y[~local.reshape(-1)] = np.nan  # the preceding kernels do not write these rows
    weights = rng.random((rows, top_k)).astype(np.float32)
    out = np.zeros((rows, hidden), ml_dtypes.bfloat16)
    scalars = [("i", hidden), ("i", 4), ("i", 12)]
    runner = Runner(compiled, arch)
    (got,) = runner.in_order("combine", [y, ids, weights, out], [3], scalars, (rows, 2))
    picked = np.where(local[..., None], y.reshape(rows, top_k, hidden).astype(np.float64), 0)
    close(got, (picked * weights[..., None]).sum(1), 2**-8)
    assert (got[1].astype(np.float32) == 0).all()


def test_a_wrong_expert_is_detected(compiled):
    """Negative control: blocks are assigned to the wrong expert."""
    runner, tag, batch = Runner(compiled, "gfx950"), Tag.E4M3FN, Batch(64)
    act = quantised(np.random.default_rng(6).standard_normal((PAIRS, WIDTH)), "plain", tag)
    w2 = quantised_weight(batch.w2, "plain", tag)
    out, scale, _ = quantised(np.zeros((PAIRS, HIDDEN)), "plain", tag)
    wrong = Batch(64)
    wrong.experts = np.array([1, 0, 2], np.int32)
    got, _ = launch(runner, "down[plain,plain,64]", wrong, act, w2, out, scale, HIDDEN, WIDTH, 1)
    want = np.einsum("pk,pnk->pn", act[2], w2[2][batch.ids.reshape(-1)])
    a, b = got.astype(np.float64).ravel(), want.ravel()
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) < 0.2


def test_unused_blocks_are_not_computed(compiled):
    """The result stays unchanged if no block is in use."""
    runner, tag, batch = Runner(compiled, "gfx950"), Tag.E4M3FN, Batch(64)
    act = quantised(np.zeros((PAIRS, WIDTH)), "plain", tag)
    w2 = quantised_weight(batch.w2, "plain", tag)
    none = Batch(64)
    none.used = np.array([0], np.int32)
    out = np.full((PAIRS, HIDDEN), 7, ml_dtypes.bfloat16)
    got, _ = launch(
        runner,
        "down[plain,plain,64]",
        none,
        act,
        w2,
        out,
        np.zeros(1, np.float32),
        HIDDEN,
        WIDTH,
        1,
    )
    assert (got.astype(np.float32) == 7).all()
