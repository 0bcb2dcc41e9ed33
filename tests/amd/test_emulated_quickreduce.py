"""Rung 5: the all-reduce kernels of several ranks, interleaved at random over one memory.

This tests the protocol: addresses and order of writes, flags, sequence numbers, segments. The
emulator does not reorder memory accesses, so it cannot find a missing fence; test_compile.py checks
the fences in the machine code.
"""

import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from emulated_ranks import Ranks, bfloat16
from kernel_builds import PROTOCOL

from ffn_worker.allreduce import formats_numpy, formats_table

HIDDEN = 1024
NUMBERS = [(case, "gfx942" if case % 2 else "gfx950") for case in range(len(PROTOCOL))]


def inputs(world: int, rows: int, hidden: int, seed: int) -> list[np.ndarray]:
    """Returns bfloat16 rows with zeros of both signs, tiny and huge blocks, and a NaN."""
    x = np.random.default_rng(seed).standard_normal((world, rows * hidden)).astype(np.float32)
    x[:, :64], x[:, 64:128] = 0, -0.0
    x[:, 128:192] *= 2e-5
    x[:, 192:256] *= 15000
    x[0, 300] = np.nan
    return list(x.astype(bfloat16).reshape(world, rows, hidden))


def same(got: np.ndarray, want: np.ndarray) -> bool:
    nan = np.isnan(want.astype(np.float32))
    bits = (got.view(np.uint16) == want.view(np.uint16)) | nan
    return bool((np.isnan(got.astype(np.float32)) == nan).all() and bits.all())


def reference(
    xs: list[np.ndarray], fmt: formats_table.ReduceFormat | None, gather: bool
) -> np.ndarray:
    if fmt is None:
        return sum((x.astype(np.float32) for x in xs), np.float32(-0.0)).astype(bfloat16)
    n = xs[0].size
    with np.errstate(over="ignore"):
        halves = [x.astype(np.float32).astype(np.float16).reshape(-1) for x in xs]
    padded = [np.pad(h, (0, -n % formats_table.ATOM_VALUES)) for h in halves]
    total = formats_numpy.decode_sum(np.stack([formats_numpy.encode(h, fmt) for h in padded]), fmt)
    if gather:
        total = formats_numpy.decode(formats_numpy.encode(total, fmt), fmt)
    return total[:n].astype(np.float32).astype(bfloat16).reshape(xs[0].shape)


@pytest.mark.parametrize(("case", "arch"), NUMBERS, ids=lambda v: str(v))
def test_ranks_agree_with_the_reference(compiled, case, arch):
    """Calls of several sizes follow each other without synchronization: unequal and empty segments,
    partial atoms, and two launches if the buffer is small."""
    name, world, tile, atoms, gather = PROTOCOL[case]
    fmt = formats_table.FORMATS.get(name)
    cheap = fmt in (None, formats_table.FP16)
    ranks = Ranks(compiled, arch, world, 1 if cheap else 2, fmt)
    sizes = [(2, HIDDEN), (1, 512), (7, HIDDEN)] if cheap else [(5, HIDDEN)]
    called = []
    for seed, (rows, hidden) in enumerate(sizes):
        xs = inputs(world, rows, hidden, seed)
        called.append((xs, ranks.two_shot(xs, gather, tile=tile, atoms=atoms)))
    ranks.run(seed=case)
    for xs, results in called:
        shares = np.array_split(np.arange(len(xs[0])), world)
        for rank, out in enumerate(results()):
            mine = slice(None) if gather else shares[rank]
            want = reference([x[mine] for x in xs], fmt, gather)
            assert same(out[: len(want)], want), rank
    assert not any(ranks.noted(rank) for rank in range(world))


def test_one_shot_is_exact_in_any_order(compiled):
    ranks = Ranks(compiled, "gfx942", 2, 1)
    called = []
    for seed in range(6):
        xs = inputs(2, 1, 3000 if seed % 3 else 700, seed)
        called.append((xs, ranks.one_shot(xs)))
    ranks.run(seed=0)
    for xs, results in called:
        want = (xs[0].astype(np.float32) + xs[1].astype(np.float32)).astype(bfloat16)
        assert all(same(out, want) for out in results())


# Negative controls.


@pytest.mark.parametrize(("shot", "world", "gather"), [(0, 4, True), (1, 3, False)])
def test_sums_without_waiting_are_wrong(compiled, shot, world, gather):
    """Flags are raised before any rank has sent, or, in a reduce-scatter, before any rank has read.
    This has the effect of a missing wait."""
    ranks = Ranks(compiled, "gfx942", world, 1)
    ranks.raise_flags(shot)
    called = []
    for seed in range(1 if gather else 3):
        xs = inputs(world, 2, HIDDEN, seed)
        called.append((xs, ranks.two_shot(xs, gather)))
    ranks.run(seed=0)
    right = []
    for xs, results in called:
        shares = np.array_split(np.arange(2), world)
        for rank, out in enumerate(results()):
            want = reference([x[slice(None) if gather else shares[rank]] for x in xs],
                             formats_table.FP16, gather)  # fmt: skip
            right.append(same(out[: len(want)], want))
    assert not all(right)


def test_a_lost_rank_ends_the_wait_and_is_reported(compiled):
    ranks = Ranks(compiled, "gfx942", 4, 2, late=2, spins=300)
    ranks.two_shot(inputs(4, 4, HIDDEN, 0), True)
    ranks.run(seed=0, fair=True)
    assert [ranks.noted(rank) for rank in range(4)] == [3, 3, 0, 3]
