"""Several ranks of the all-reduce on the emulator, each with a stream of launches of its own."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from emulator import Kernel, Memory

from ffn_worker.allreduce import formats, quick_plan

bfloat16 = np.dtype(ml_dtypes.bfloat16)
SPINS = 1_000_000
_STRETCH = 40

Results = Callable[[], list[np.ndarray]]
"""What every rank has got, once ``run`` was called."""


@dataclass
class Ranks:
    """``world`` ranks whose buffers lie in one memory, as peer-mapped GPUs would see it.

    A call adds one launch to every rank's stream; ``run`` interleaves the streams at random, so
    that one rank may be launches ahead of another, as far as the kernels let it.

    fmt: of two shots, None for exact ones. late: a rank whose launches never run.
    """

    compiled: object
    arch: str
    world: int
    segment_atoms: int
    fmt: formats.ReduceFormat | None = formats.FP16
    late: int | None = None
    spins: int = SPINS
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        put, world = self.memory.put, self.world
        self.buffer = quick_plan.Buffer(
            world, self.segment_atoms, (self.fmt or formats.FP16).atom_bytes, 4
        )
        self.peers = np.array([put(np.zeros(self.buffer.nbytes, np.uint8)) for _ in range(world)])
        counters = np.zeros(max(self.segment_atoms, self.buffer.one_shot_tiles), np.int32)
        word = np.zeros(1, np.int32)
        self.tables = [put(self.peers.astype(np.int64)) for _ in range(world)]
        self.sequences = [(put(counters), put(counters)) for _ in range(world)]
        self.notes = [(put(word), put(word)) for _ in range(world)]
        self._streams: list[deque[list[Iterator[None]]]] = [deque() for _ in range(world)]

    def noted(self, rank: int) -> int:
        """The number that rank ``rank``'s host finds."""
        return int(self.memory.get(self.notes[rank][1], np.zeros(1, np.int32))[0])

    def raise_flags(self, shot: int) -> None:
        """Negative control: the flags of one shot are far ahead, no wait for them waits."""
        flags = np.full(self.segment_atoms * self.world, 1 << 20, np.int32).view(np.uint8)
        for base in self.peers:
            self.memory.store(np.array([base + shot * flags.size]), flags[None])

    def two_shot(
        self, xs: list[np.ndarray], gather: bool, *, tile: int = 1, atoms: int = 1
    ) -> Results:
        """Sums of everything, or without ``gather`` of each rank's rows, first in its array."""
        rows, hidden = xs[0].shape
        if gather:
            segments = quick_plan.flat_segments(rows * hidden, self.world)
        else:
            segments = quick_plan.row_segments(rows, hidden, self.world)
        places, b = self._put(xs), self.buffer
        name = self.fmt.name if self.fmt else "exact"
        name = f"{name},{self.world},{tile},{atoms},{'all' if gather else 'own'}"
        for launch in quick_plan.launches(segments, b, 1, quick_plan.HIP):
            tiles = -(-min(b.segment_atoms, segments.atoms - launch.first) // tile)
            shape = (rows * hidden, segments.unit, segments.base, segments.longer, launch.first)
            for rank, place in enumerate(places):
                ours = (tiles, self.spins, rank, b.segment_atoms, b.two_shot_inbox, b.segment_bytes)
                scalars = [("i", n) for n in (*shape, *ours)]
                self._launch(f"two_shot[{name}]", rank, 0, place, scalars, min(2, tiles))
        return lambda: [self.memory.get(out, x) for (_, out), x in zip(places, xs, strict=True)]

    def one_shot(self, xs: list[np.ndarray]) -> Results:
        places, b, n = self._put(xs), self.buffer, xs[0].size
        offsets = (b.one_shot_tiles, b.one_shot_flags, b.one_shot_inbox)
        for rank, place in enumerate(places):
            scalars = [("i", v) for v in (n, self.spins, rank, *offsets)]
            blocks = -(-n // quick_plan.ONE_SHOT_BLOCK)
            self._launch(f"one_shot[{self.world}]", rank, 1, place, scalars, blocks)
        return lambda: [self.memory.get(out, x) for (_, out), x in zip(places, xs, strict=True)]

    def run(self, seed: int, *, fair: bool = False) -> None:
        """Runs all launches to their ends. fair: no rank is quicker than another."""
        rng = np.random.default_rng(seed)
        while any(self._streams):
            speeds = np.ones(self.world) if fair else rng.random(self.world) ** 3 + 0.02
            for _ in range(_STRETCH):
                waiting = [r for r in range(self.world) if self._streams[r]]
                if not waiting:
                    return
                odds = speeds[waiting] / speeds[waiting].sum()
                self._advance(int(rng.choice(waiting, p=odds)), rng)

    def _advance(self, rank: int, rng: np.random.Generator) -> None:
        workgroups = self._streams[rank][0]
        i = int(rng.integers(len(workgroups)))
        for _ in range(int(rng.integers(1, 40))):
            if next(workgroups[i], "over") == "over":
                del workgroups[i]
                break
        if not workgroups:  # the next launch of a stream begins when this one has ended
            self._streams[rank].popleft()

    def _put(self, xs: list[np.ndarray]) -> list[tuple[int, int]]:
        """Addresses of every rank's x and out."""
        return [(self.memory.put(x), self.memory.put(np.zeros_like(x))) for x in xs]

    def _launch(
        self, build: str, rank: int, counter: int, place: tuple, scalars: list, programs: int
    ) -> None:
        if rank == self.late:
            return
        facts = self.compiled(self.arch).index[build]
        code = self.compiled(self.arch).code(build)
        kernel = Kernel(code, facts["kernel"], self.arch, facts["shared"])
        addresses = [*place, self.tables[rank], self.sequences[rank][counter], *self.notes[rank]]
        arguments = [("q", a) for a in addresses] + scalars
        launch = kernel.workgroups(self.memory, arguments, (programs,), facts["warps"])
        self._streams[rank].append(launch)
