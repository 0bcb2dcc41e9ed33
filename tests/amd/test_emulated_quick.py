"""Rung 5: the all-reduce kernels of several ranks, interleaved at random over one memory.

What this shows is the protocol: who writes where, flags, sequence numbers, segments. The emulator
keeps memory in order, so that a missing fence would not show; that it is there is asserted in
test_compile.py.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

import ml_dtypes
from emulator import Kernel, Memory
from kernel_builds import PROTOCOL

from ffn_worker.allreduce import formats, quick_plan

bfloat16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN = 1024
SPINS = 1_000_000


@dataclass
class Ranks:
    """``world`` ranks with their buffers in one memory, as peer-mapped GPUs would see it.

    late: a rank whose launches never run.
    """

    compiled: object
    arch: str
    world: int
    segment_atoms: int
    fmt: formats.ReduceFormat = formats.FP16
    late: int | None = None
    spins: int = SPINS
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        put, world = self.memory.put, self.world
        self.buffer = quick_plan.Buffer(world, self.segment_atoms, self.fmt.atom_bytes, 4)
        self.peers = np.array([put(np.zeros(self.buffer.nbytes, np.uint8)) for _ in range(world)])
        self.tables = [put(self.peers.astype(np.int64)) for _ in range(world)]
        counters = np.zeros(max(self.segment_atoms, self.buffer.one_shot_tiles), np.int32)
        self.sequences = [(put(counters), put(counters)) for _ in range(world)]
        self.notes = [
            (put(np.zeros(1, np.int32)), put(np.zeros(1, np.int32))) for _ in range(world)
        ]

    def noted(self, rank: int) -> int:
        """The number that rank ``rank``'s host finds."""
        return int(self.memory.get(self.notes[rank][1], np.zeros(1, np.int32))[0])

    def raise_all_flags(self) -> None:
        """Negative control: every flag is far ahead, no wait waits."""
        flags = np.full(self.buffer.two_shot_inbox // 4, 1 << 20, np.int32)
        for base in self.peers:
            self.memory.store(np.array([base]), flags.view(np.uint8)[None])

    def _put(self, xs: list[np.ndarray]) -> list[tuple[int, int]]:
        """Addresses of every rank's x and out."""
        return [(self.memory.put(x), self.memory.put(np.zeros_like(x))) for x in xs]

    def _run(self, build: str, sequence: int, places, programs: int, scalars, seed: int) -> None:
        facts = self.compiled(self.arch).index[build]
        code = self.compiled(self.arch).code(build)
        kernel = Kernel(code, facts["kernel"], self.arch, facts["shared"])
        running = []
        for rank, place in enumerate(places):
            addresses = [*place, self.tables[rank], self.sequences[rank][sequence]]
            arguments = [("q", a) for a in (*addresses, *self.notes[rank])] + scalars(rank)
            if rank != self.late:
                running += kernel.workgroups(self.memory, arguments, (programs,), facts["warps"])
        rng = np.random.default_rng(seed)
        while running:
            i = int(rng.integers(len(running)))
            for _ in range(int(rng.integers(1, 40))):
                if next(running[i], "over") == "over":
                    del running[i]
                    break

    def two_shot(self, xs: list[np.ndarray], atoms: int, gather: bool, seed: int) -> list:
        """All ranks' results: of everything, or each rank's rows first."""
        rows, hidden = xs[0].shape
        if gather:
            segments = quick_plan.flat_segments(rows * hidden, self.world)
        else:
            segments = quick_plan.row_segments(rows, hidden, self.world)
        places = self._put(xs)
        b, name = self.buffer, f"{self.fmt.name},{self.world},{atoms},{'all' if gather else 'own'}"
        for launch in quick_plan.launches(segments, b, 1, quick_plan.HIP):
            tiles = -(-min(b.segment_atoms, segments.atoms - launch.first) // atoms)
            numbers = (rows * hidden, segments.unit, segments.base, segments.longer, launch.first)

            def scalars(rank: int, numbers=numbers, tiles=tiles) -> list:
                ours = (tiles, self.spins, rank, b.segment_atoms, b.two_shot_inbox)
                return [("i", n) for n in (*numbers, *ours)] + [("l", b.segment_bytes)]

            self._run(f"two_shot[{name}]", 0, places, min(2, tiles), scalars, seed)
        return [self.memory.get(out, x) for (_, out), x in zip(places, xs, strict=True)]

    def one_shot(self, xs: list[np.ndarray], seed: int) -> list:
        b, n = self.buffer, xs[0].size

        def scalars(rank: int) -> list:
            ours = (b.one_shot_tiles, b.one_shot_flags, b.one_shot_inbox)
            return [("i", v) for v in (n, self.spins, rank, *ours)]

        blocks, places = -(-n // quick_plan.ONE_SHOT_BLOCK), self._put(xs)
        self._run(f"one_shot[{self.world}]", 1, places, blocks, scalars, seed)
        return [self.memory.get(out, x) for (_, out), x in zip(places, xs, strict=True)]


def inputs(world: int, rows: int, hidden: int, seed: int) -> list[np.ndarray]:
    """bfloat16 rows with zeros of both signs, tiny and huge blocks and a NaN."""
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


def reference(xs: list[np.ndarray], fmt: formats.ReduceFormat, gather: bool) -> np.ndarray:
    n = xs[0].size
    with np.errstate(over="ignore"):
        halves = [x.astype(np.float32).astype(np.float16).reshape(-1) for x in xs]
    padded = [np.pad(h, (0, -n % formats.ATOM_VALUES)) for h in halves]
    total = formats.decode_sum(np.stack([formats.encode(h, fmt) for h in padded]), fmt)
    if gather:
        total = formats.decode(formats.encode(total, fmt), fmt)
    return total[:n].astype(np.float32).astype(bfloat16).reshape(xs[0].shape)


CASES = [
    ("gfx942", 0), ("gfx950", 0), ("gfx942", 1), ("gfx950", 2), ("gfx942", 3), ("gfx950", 4),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "case"), CASES, ids=str)
def test_ranks_agree_with_the_reference(compiled, arch, case):
    """Segments of unequal length, a last atom that is not full, more tiles than programs, two
    launches where the buffer is small; calls of other sizes follow."""
    name, world, atoms, gather = PROTOCOL[case]
    fmt = formats.FORMATS[name]
    ranks = Ranks(compiled, arch, world, 1 if fmt is formats.FP16 else 2, fmt)
    sizes = [(11, HIDDEN), (2, HIDDEN)] if fmt is formats.FP16 else [(5, HIDDEN)]
    for seed, (rows, hidden) in enumerate(sizes):
        xs = inputs(world, rows, hidden, seed)
        outs = ranks.two_shot(xs, atoms, gather, seed)
        shares = np.array_split(np.arange(rows), world)
        for rank, out in enumerate(outs):
            mine = np.arange(rows) if gather else shares[rank]
            want = reference([x[mine] for x in xs], fmt, gather)
            assert same(out[: len(mine)], want), (seed, rank)
        assert not any(ranks.noted(rank) for rank in range(world))


def test_one_shot_is_exact_in_any_order(compiled):
    ranks = Ranks(compiled, "gfx942", 2, 1)
    for seed in range(4):
        xs = inputs(2, 1, 3000 if seed % 2 else 700, seed)
        want = (xs[0].astype(np.float32) + xs[1].astype(np.float32)).astype(bfloat16)
        for out in ranks.one_shot(xs, seed):
            assert same(out, want)


# Negative controls.


def test_without_waiting_the_sum_is_wrong(compiled):
    """The flags are up before anyone sent: what a missing wait would do."""
    wrong = 0
    for seed in range(2):
        ranks = Ranks(compiled, "gfx942", 4, 2)
        ranks.raise_all_flags()
        xs = inputs(4, 4, HIDDEN, seed)
        want = reference(xs, formats.FP16, True)
        wrong += sum(not same(out, want) for out in ranks.two_shot(xs, 1, True, seed))
    assert wrong > 0


def test_a_lost_rank_ends_the_wait_and_is_named(compiled):
    ranks = Ranks(compiled, "gfx942", 4, 2, late=2, spins=300)
    ranks.two_shot(inputs(4, 4, HIDDEN, 0), 1, True, 0)
    assert [ranks.noted(rank) for rank in range(4)] == [3, 3, 0, 3]
