"""What quick's kernels are told: where things lie in a rank's buffer, and who sums which values.

Pure, without torch. The kernels are described in :mod:`ffn_worker.allreduce.quick_triton`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ffn_worker.allreduce.formats import ATOM_VALUES

ONE_SHOT_BLOCK = 1024
"""Values that one program of the one-shot kernel sums."""
_VALUE_BYTES = 4


@dataclass(frozen=True)
class Tuning:
    """How the two-shot kernel is cut, `afd bench allreduce --sweep` compares some.

    programs: per multiprocessor or compute unit; so few that all of a launch run at once, and none
    that waits keeps others out. tile_atoms: at most, a power of two. warps: Triton's, of a program.
    """

    programs: int
    tile_atoms: int
    warps: int


CUDA = Tuning(programs=2, tile_atoms=4, warps=8)
HIP = Tuning(programs=2, tile_atoms=4, warps=4)
"""Both have 256 threads in a program. Chosen without hardware."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


@dataclass(frozen=True)
class Buffer:
    """Layout of the buffer that every rank has and all ranks write to.

    segment_atoms: atoms of one segment that a two-shot launch can take. atom_bytes: of the format.
    one_shot_tiles: blocks of ONE_SHOT_BLOCK values that a one-shot launch can take.
    """

    world: int
    segment_atoms: int
    atom_bytes: int
    one_shot_tiles: int

    @property
    def segment_bytes(self) -> int:
        return self.segment_atoms * self.atom_bytes

    @property
    def two_shot_inbox(self) -> int:
        """Behind the flags: int32 [2 shots, segment_atoms, world]."""
        return _aligned(2 * self.segment_atoms * self.world * 4)

    @property
    def one_shot_flags(self) -> int:
        return _aligned(self.two_shot_inbox + 2 * self.world * self.segment_bytes)

    @property
    def one_shot_inbox(self) -> int:
        return _aligned(self.one_shot_flags + self.one_shot_tiles * self.world * 4)

    @property
    def nbytes(self) -> int:
        slots = 2 * self.world * self.one_shot_tiles
        return self.one_shot_inbox + slots * ONE_SHOT_BLOCK * _VALUE_BYTES


@dataclass(frozen=True)
class Segments:
    """Who sums what: rank r has ``base`` units of ``unit`` values, the first ``longer`` ranks one
    more, in order."""

    unit: int
    base: int
    longer: int

    @property
    def atoms(self) -> int:
        """Atoms of the longest segment."""
        return -(-(self.base + (self.longer > 0)) * self.unit // ATOM_VALUES)


def flat_segments(n: int, world: int) -> Segments:
    """n values by whole atoms: the pieces of an all-reduce."""
    return Segments(ATOM_VALUES, *divmod(-(-n // ATOM_VALUES), world))


def row_segments(rows: int, hidden: int, world: int) -> Segments:
    """The pieces of a reduce-scatter: those of ``row_shares``."""
    return Segments(hidden, *divmod(rows, world))


@dataclass(frozen=True)
class Launch:
    """One launch of the two-shot kernel: ``tiles`` tiles of ``tile_atoms`` atoms of every segment,
    from atom ``first`` on."""

    first: int
    tiles: int
    tile_atoms: int
    programs: int


def launches(
    segments: Segments, buffer: Buffer, processors: int, tuning: Tuning
) -> Iterator[Launch]:
    """As few launches as the buffer allows. Where there are tiles enough for all programs they get
    larger: fewer flags.

    processors: multiprocessors or compute units of the device.
    """
    programs = tuning.programs * processors
    for first in range(0, segments.atoms, buffer.segment_atoms):
        atoms = min(buffer.segment_atoms, segments.atoms - first)
        size = 1
        while size < tuning.tile_atoms and atoms >= 2 * size * programs:
            size *= 2
        tiles = -(-atoms // size)
        yield Launch(first, tiles, size, min(tiles, programs))
