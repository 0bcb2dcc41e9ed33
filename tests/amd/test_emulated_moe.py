"""Rung 5: the grouped kernels of the experts run on the emulator and agree with float64."""

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
    """(codes, scales, the float64 values they stand for) of rows [n, k]."""
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
    """The same for weights [E, N, K]; FP8 by blocks of 128 x 128."""
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
    """Pairs of nine rows, sorted by expert and padded; expert 2 gets none."""

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


def launch(runner, name, batch, a, b, c, c_scale, n, k, rows_per):
    inputs = [a[0], a[1], b[0], b[1]]
    sorted_pairs = [batch.pairs, batch.experts, batch.used]
    scalars = [("i", n), ("i", k), ("i", PAIRS), ("i", rows_per), ("i", -1), ("i", 0)]
    blocks = len(batch.experts) * -(-n // 128)
    return runner.in_order(name, [*inputs, c, c_scale, *sorted_pairs], [4, 5], scalars, (blocks,))


def silu_product(x: np.ndarray, w13: np.ndarray, ids: np.ndarray) -> np.ndarray:
    rows = np.repeat(x, TOP_K, axis=0)
    h = np.einsum("pk,pnk->pn", rows, w13[ids.reshape(-1)])
    gate, up = h[:, :WIDTH], h[:, WIDTH:]
    return gate / (1 + np.exp(-gate)) * up


def close(got: np.ndarray, want: np.ndarray, bound: float) -> None:
    error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
    assert error <= bound, error


CASES = [
    ("plain", "plain", 64),
    ("fp8", "fp8", 64),
    ("mxfp4", "mxfp4", 64),
    ("plain", "mxfp4", 64),
    ("fp8", "fp8", 16),
]
# One rounding of the result, relative to its largest value; FP8 and MXFP4 results are coarse.
ACTIVATION_BOUND = {"plain": 2**-8, "fp8": 2**-4, "mxfp4": 0.26}


@pytest.mark.parametrize(("a", "b", "block"), CASES)
@pytest.mark.parametrize("arch", FP8)
def test_gate_up(compiled, arch, a, b, block):
    runner, tag, batch = Runner(compiled, arch), FP8[arch], Batch(block)
    x, w13 = quantised(batch.x, a, tag), quantised_weight(batch.w13, b, tag)
    out, scale, _ = quantised(np.zeros((PAIRS, WIDTH)), a, tag)
    got, got_scale = launch(
        runner, f"gate_up[{a},{b},{block}]", batch, x, w13, out, scale, WIDTH, HIDDEN, TOP_K
    )
    want = silu_product(x[2], w13[2], batch.ids)
    if a == "fp8":
        values = codecs.dequantise_fp8(got, got_scale, tag)
    elif a == "mxfp4":
        values = codecs.dequantise_mxfp4(got, got_scale)
    else:
        values = got
    close(values, want, ACTIVATION_BOUND[a])
    if a != "plain":  # the scales are those of the exact result, up to a rounding of it
        _, want_scale, _ = quantised(want, a, tag)
        assert np.isclose(got_scale.astype(float), want_scale, rtol=1e-5).mean() > 0.98


@pytest.mark.parametrize(("a", "b", "block"), CASES)
@pytest.mark.parametrize("arch", FP8)
def test_down(compiled, arch, a, b, block):
    runner, tag, batch = Runner(compiled, arch), FP8[arch], Batch(block)
    rng = np.random.default_rng(6)
    act = quantised(rng.standard_normal((PAIRS, WIDTH)), a, tag)
    w2 = quantised_weight(batch.w2, b, tag)
    out, scale, _ = quantised(np.zeros((PAIRS, HIDDEN)), "plain", tag)
    got, _ = launch(runner, f"down[{a},{b},{block}]", batch, act, w2, out, scale, HIDDEN, WIDTH, 1)
    want = np.einsum("pk,pnk->pn", act[2], w2[2][batch.ids.reshape(-1)])
    close(got, want, 2**-8)


@pytest.mark.parametrize("arch", FP8)
def test_combine(compiled, arch):
    rng = np.random.default_rng(1)
    rows, top_k, hidden = 3, 8, 1280  # a second block of columns, partly masked
    y = rng.standard_normal((rows * top_k, hidden)).astype(ml_dtypes.bfloat16)
    ids = rng.integers(0, 16, (rows, top_k)).astype(np.int32)
    ids[0, 0], ids[1] = -1, 15
    local = (ids >= 4) & (ids < 12)
    y[~local.reshape(-1)] = np.nan  # never written by the kernels before
    weights = rng.random((rows, top_k)).astype(np.float32)
    out = np.zeros((rows, hidden), ml_dtypes.bfloat16)
    scalars = [("i", hidden), ("i", 4), ("i", 12)]
    runner = Runner(compiled, arch)
    (got,) = runner.in_order("combine", [y, ids, weights, out], [3], scalars, (rows, 2))
    picked = np.where(local[..., None], y.reshape(rows, top_k, hidden).astype(np.float64), 0)
    close(got, (picked * weights[..., None]).sum(1), 2**-8)
    assert (got[1].astype(np.float32) == 0).all()


def test_another_expert_is_noticed(compiled):
    """Negative control: blocks given to the wrong expert."""
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
    """Rows of nobody stay what they were: the spare block would have written pair PAIRS."""
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
