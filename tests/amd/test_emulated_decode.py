"""Rung 5: both stages of decode attention over a paged FP8 cache, compared with numpy."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from kernel_builds import DECODE
from kernel_run import Runner

FP8 = {"gfx942": ml_dtypes.float8_e4m3fnuz, "gfx950": ml_dtypes.float8_e4m3fn}
SPLITS, ROOM = 3, 12


@pytest.mark.parametrize("arch", FP8)
def test_equals_attention_over_pages(compiled, arch):
    """Requests of several tiles plus a partial one, one token, or none; NaN past their ends."""
    dim, heads, _, page = DECODE["few"]
    rng = np.random.default_rng(5)
    lengths = np.array([83, 0, 1], np.int32)
    table = rng.permutation(ROOM)[:9].astype(np.int32).reshape(1, 9).repeat(3, 0).reshape(3, 9)
    table[2, 0] = table[0, 8]
    q, keys, values = (
        rng.standard_normal(shape).astype(FP8[arch])
        for shape in ((3, heads, dim), (ROOM, page, dim), (ROOM, page, dim))
    )
    for cache in (keys, values):
        cache[table[0, 5], 3:] = np.nan
        cache[table[2, 0], 1:] = np.nan
    scales = [np.array([s], np.float32) for s in (0.5, 0.75, 1.5)]
    parts = np.full((3, heads, SPLITS, dim), 7, np.float16)
    lse = np.full((3, heads, SPLITS), 7, np.float32)
    strides = [("i", n) for n in (heads * dim, 9, page * dim, dim, dim, SPLITS)]
    run = Runner(compiled, arch)
    arrays = [q, keys, values, table, lengths, *scales, parts, lse]
    parts, lse = run.in_order(
        "decode[few]", arrays, [8, 9], [("f", 0.125), *strides], (SPLITS, 1, 3)
    )
    out = np.full((3, heads, dim), 7, ml_dtypes.bfloat16)
    sizes = [("i", 3 * heads), ("i", SPLITS)]
    (out,) = run.in_order("combine_decode", [parts, lse, scales[2], out], [3], sizes, (3,))

    want = np.zeros((3, heads, dim), np.float32)
    for request, length in enumerate(lengths):
        if length:
            k, v = (
                cache[table[request]].reshape(-1, dim)[:length].astype(np.float32)
                for cache in (keys, values)
            )
            weights = np.exp(q[request].astype(np.float32) @ k.T * 0.125 * 0.5 * 0.75)
            want[request] = weights / weights.sum(-1, keepdims=True) @ v * 1.5
    assert not out[1].astype(np.float32).any()
    assert np.allclose(out.astype(np.float32), want, rtol=0.01, atol=0.004)
