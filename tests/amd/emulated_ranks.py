"""Runs several ranks of the all-reduce on the emulator, each with its own stream of launches."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from emulator import Kernel, Memory

from ffn_worker.allreduce import formats_table, quickreduce_plan

bfloat16 = np.dtype(ml_dtypes.bfloat16)
SPINS = 1_000_000
_STRETCH = 40

Results = Callable[[], list[np.ndarray]]
"""Returns every rank's result; call it after ``run``."""


@dataclass
class Ranks:
    """``world`` ranks whose buffers are in one memory, like peer-mapped GPU memory.

    A call adds one launch to every rank's stream. ``run`` interleaves the streams at random, so a
    rank may be several launches ahead of another, as far as the kernels allow.

    fmt: format of two-shot sums, None for exact sums. late: a rank whose launches never run.
    """

    compiled: object
    arch: str
    world: int
    segment_atoms: int
    fmt: formats_table.ReduceFormat | None = formats_table.FP16
    late: int | None = None
    spins: int = SPINS
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        put, world = self.memory.put, self.world
        self.buffer = quickreduce_plan.Buffer(
            world, self.segment_atoms, (self.fmt or formats_table.FP16).atom_bytes, 4
        )
        self.peers = np.array([put(np.zeros(self.buffer.nbytes, np.uint8)) for _ in range(world)])
        counters = np.zeros(max(self.segment_atoms, self.buffer.one_shot_tiles), np.int32)
        word = np.zeros(1, np.int32)
        self.tables = [put(self.peers.astype(np.int64)) for _ in range(world)]
        self.sequences = [(put(counters), put(counters)) for _ in range(world)]
        self.notes = [(put(word), put(word)) for _ in range(world)]
        self._streams: list[deque[list[Iterator[None]]]] = [deque() for _ in range(world)]

    def noted(self, rank: int) -> int:
        """Returns the number that the kernel reported to the host of rank ``rank``."""
        return int(self.memory.get(self.notes[rank][1], np.zeros(1, np.int32))[0])

    def raise_flags(self, shot: int) -> None:
        """Negative control: sets the flags of one shot far ahead, so that no wait blocks."""
        flags = np.full(self.segment_atoms * self.world, 1 << 20, np.int32).view(np.uint8)
        for base in self.peers:
            self.memory.store(np.array([base + shot * flags.size]), flags[None])

    def two_shot(
        self, xs: list[np.ndarray], gather: bool, *, tile: int = 1, atoms: int = 1
    ) -> Results:
        """Launches a sum of all values, or without ``gather`` of each rank's own rows."""
        rows, hidden = xs[0].shape
        if gather:
            segments = quickreduce_plan.flat_segments(rows * hidden, self.world)
        else:
            segments = quickreduce_plan.row_segments(rows, hidden, self.world)
        places, b = self._put(xs), self.buffer
        name = self.fmt.name if self.fmt else "exact"
        name = f"{name},{self.world},{tile},{atoms},{'all' if gather else 'own'}"
        for launch in quickreduce_plan.launches(segments, b, 1, quickreduce_plan.HIP):
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
            blocks = -(-n // quickreduce_plan.ONE_SHOT_BLOCK)
            self._launch(f"one_shot[{self.world}]", rank, 1, place, scalars, blocks)
        return lambda: [self.memory.get(out, x) for (_, out), x in zip(places, xs, strict=True)]

    def run(self, seed: int, *, fair: bool = False) -> None:
        """Runs all launches to completion. fair: all ranks run at the same speed."""
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
        if not workgroups:  # the launch has ended; the stream's next one may begin
            self._streams[rank].popleft()

    def _put(self, xs: list[np.ndarray]) -> list[tuple[int, int]]:
        """Returns the addresses of every rank's x and out."""
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
