"""Rung 5: the kernels around DeepGEMM's products, on the emulator, compared with numpy.

They serve Hopper only. CI has no GPU, so the emulator checks their Triton source.
"""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from kernel_run import Runner

from afd.wire import codecs
from afd.wire.layout import Tag

FP8 = {"gfx942": Tag.E4M3FNUZ, "gfx950": Tag.E4M3FN}
ROWS, EACH, HIDDEN, ROOM = 5, 3, 640, 24


def slots(rng: np.random.Generator) -> np.ndarray:
    """Returns unordered slots for most pairs; -1 for the others and for all of row 2."""
    found = rng.permutation(ROOM)[: ROWS * EACH].astype(np.int32)
    found[[1, 6, 7, 8, 12]] = -1
    return found


@pytest.mark.parametrize("arch", FP8)
def test_pair_slots(compiled, arch):
    """Slots equal those of a plain loop, with several chunks of pairs and non-local pairs."""
    rng, top_k = np.random.default_rng(9), 8
    rows, start, experts, block, chunk = 35, 4, 37, 16, 8
    ids = rng.integers(-1, 45, (rows, top_k)).astype(np.int32)
    ids[ids == 6] = 5
    local = np.where((ids >= start) & (ids < start + experts), ids - start, -1).reshape(-1)
    runs = [np.flatnonzero(local == e) for e in range(experts)]
    counts = np.array([len(run) for run in runs], np.int32)
    begins = np.cumsum(-(-counts // block) * block) - (-(-counts // block) * block)
    by_chunk = np.full((-(-rows * top_k // chunk), 64), -7, np.int32)
    for e in range(experts):
        by_chunk[:, e] = np.add.reduceat(local == e, range(0, rows * top_k, chunk))
    want = np.full(rows * top_k, -1)
    for begin, run in zip(begins, runs, strict=True):
        want[run] = begin + np.arange(len(run))
    before = np.arange(experts) + 2**40
    room = int((-(-counts // block) * block).sum())
    outputs = [before, *(np.full(n, -7, np.int32) for n in (rows * top_k, room, experts, 2))]
    sizes = [("i", rows * top_k), ("i", start), ("i", experts)]
    run, grid = Runner(compiled, arch), (len(by_chunk), 2)
    load, got, order, ends, taken = run("place_pairs", [ids, by_chunk], outputs, sizes, grid)
    assert (load - before).tolist() == counts.tolist()
    inverse = np.full(room, -7)
    inverse[want[want >= 0]] = np.flatnonzero(want >= 0)
    assert order.tolist() == inverse.tolist()
    assert got.tolist() == want.tolist() and ends.tolist() == (begins + counts).tolist()
    assert taken.tolist() == [0, 0]


@pytest.mark.parametrize("arch", FP8)
def test_rows_are_gathered_into_their_slots(compiled, arch):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (ROWS, HIDDEN)).astype(np.uint8)
    scales, where = rng.random((ROWS, HIDDEN // 128)).astype(np.float32), slots(rng)
    a, a_scales = np.full((ROOM, HIDDEN), 7, np.uint8), np.full((HIDDEN // 128, ROOM), 7, "f4")
    want, want_scales = a.copy(), a_scales.copy()
    for pair, slot in enumerate(where):
        if slot >= 0:
            want[slot], want_scales[:, slot] = x[pair // EACH], scales[pair // EACH]
    arrays, sizes = [x, scales, where, a, a_scales], [("i", HIDDEN), ("i", ROOM)]
    got = Runner(compiled, arch).in_order("gather_rows", arrays, [3, 4], sizes, (ROWS,))
    assert np.array_equal(got[0], want) and np.array_equal(got[1], want_scales)


@pytest.mark.parametrize("arch", FP8)
def test_bfloat16_rows_and_products(compiled, arch):
    """bfloat16 rows without scales are gathered into their slots, then SiLU is applied."""
    rng, run = np.random.default_rng(5), Runner(compiled, arch)
    x, where = rng.standard_normal((ROWS, HIDDEN)).astype(ml_dtypes.bfloat16), slots(rng)
    unused = np.setdiff1d(np.arange(ROOM), where)
    a, sizes = np.full((ROOM, HIDDEN), 7, ml_dtypes.bfloat16), [("i", HIDDEN), ("i", ROOM)]
    arrays = [x, x, where, a, a]
    (got,) = run.in_order("gather_rows[plain]", arrays, [3], sizes, (ROWS,))
    there = where >= 0
    assert (got[unused] == 7).all()
    assert np.array_equal(got[where[there]], np.repeat(x, EACH, 0)[there])
    h = rng.standard_normal((ROOM, 2 * HIDDEN)).astype(ml_dtypes.bfloat16)
    h[unused] = np.nan
    arrays, grid = [h, where, a, a], (-(-ROWS * EACH // 2), 2)
    sizes = [("i", ROWS * EACH), *sizes]
    (got,) = run.in_order("silu[plain]", arrays, [2], sizes, grid)
    values = h[where[there]].astype(np.float64)
    want = values[:, :HIDDEN] / (1 + np.exp(-values[:, :HIDDEN])) * values[:, HIDDEN:]
    assert (got[unused] == 7).all()
    assert (
        np.abs(got[where[there]].astype(np.float64) - want) <= 2**-8 * np.abs(want) + 1e-6
    ).all()


@pytest.mark.parametrize("arch", FP8)
def test_silu_and_quantise(compiled, arch):
    """Two blocks of columns, the second partial; a value that is not finite makes its block NaN."""
    rng, tag = np.random.default_rng(2), FP8[arch]
    h = rng.standard_normal((ROOM, 2 * HIDDEN)).astype(ml_dtypes.bfloat16)
    where = slots(rng)
    h[where[0], :128], h[where[2], 5], h[where[3], :HIDDEN] = 0, np.nan, 300
    h[[slot for slot in range(ROOM) if slot not in where]] = np.nan
    a, a_scales = np.full((ROOM, HIDDEN), 7, np.uint8), np.full((HIDDEN // 128, ROOM), 7, "f4")
    arrays = [h, where, a, a_scales]
    sizes, grid = [("i", ROWS * EACH), ("i", HIDDEN), ("i", ROOM)], (-(-ROWS * EACH // 2), 2)
    codes, scales = Runner(compiled, arch).in_order("silu", arrays, [2, 3], sizes, grid)
    values = h.astype(np.float64)
    with np.errstate(over="ignore"):
        want = values[:, :HIDDEN] / (1 + np.exp(-values[:, :HIDDEN])) * values[:, HIDDEN:]
    used = where[where >= 0]
    unused = np.setdiff1d(np.arange(ROOM), used)
    assert (codes[unused] == 7).all() and (scales[:, unused] == 7).all()
    rows = np.ascontiguousarray(scales[:, used].T)
    got = codecs.dequantise_fp8(codes[used], rows, tag).astype(np.float64)
    nan = np.zeros((ROOM, HIDDEN), bool)
    nan[where[2], :128] = True
    assert np.array_equal(np.isnan(got), nan[used])
    blocks = np.abs(want).reshape(ROOM, -1, 128).max(2, keepdims=True)
    bound = np.broadcast_to(blocks, (ROOM, HIDDEN // 128, 128)).reshape(ROOM, HIDDEN) * 2**-4
    wrong = np.abs(got - want[used]) > bound[used]
    assert not wrong[~nan[used]].any()
    assert (codes[where[0], :128] & 0x7F == 0).all() and scales[0, where[0]] == 1


def results(
    rng: np.random.Generator, rows: int, hidden: int, room: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns [y, slots, weights] and the weighted sums; weights of skipped pairs are NaN."""
    y = rng.standard_normal((room, hidden)).astype(ml_dtypes.bfloat16)
    where = rng.permutation(room)[: rows * EACH].astype(np.int32).reshape(rows, EACH)
    where[0, 1], where[2] = -1, -1
    weights = rng.random((rows, EACH)).astype(np.float32)
    weights[where < 0] = np.nan
    y[np.setdiff1d(np.arange(room), where)] = np.nan
    want = np.zeros((rows, hidden))
    for row, k in zip(*np.nonzero(where >= 0), strict=True):
        want[row] += y[where[row, k]].astype(np.float64) * weights[row, k]
    return [y, where, weights], want


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("arch", FP8)
def test_results_are_summed(compiled, arch, shared):
    """The second block of columns is partial."""
    hidden, rng = 1280, np.random.default_rng(3)
    given, want = results(rng, ROWS, hidden, ROOM)
    out = np.full((ROWS, hidden), 7, ml_dtypes.bfloat16)
    added = rng.standard_normal((ROWS, hidden)).astype(ml_dtypes.bfloat16)
    if shared:
        want += added.astype(np.float64)
    sizes, run = [("i", hidden)], Runner(compiled, arch)
    name = "sum_slots[shared]" if shared else "sum_slots"
    (got,) = run.in_order(name, [*given, added, out], [4], sizes, (ROWS, 2))
    assert np.abs(got.astype(np.float64) - want).max() <= 2**-8 * np.abs(want).max()
    if not shared:
        assert (got[2].astype(np.float32) == 0).all()
