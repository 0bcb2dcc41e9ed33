"""What quick's kernels are told: where things lie in a rank's buffer, and who sums which values.

Pure, without torch. The kernels are described in :mod:`ffn_worker.allreduce.quick_triton`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ffn_worker.allreduce.formats import ATOM_VALUES

ONE_SHOT_BLOCK = 1024
"""Values that one program of the one-shot kernel sums."""
MOST_VALUES = 2**31 - 2**24
"""Of a two-shot message: a number of a value, also past the last segment's end, is an int32."""
_VALUE_BYTES = 4


@dataclass(frozen=True)
class Tuning:
    """How the two-shot kernel is cut, `afd bench allreduce --sweep` compares some.

    programs: per multiprocessor or compute unit; so few that all of a launch run at once, and none
    that waits keeps others out. tile_atoms: at most. atoms: of them at once, a power of two that
    divides them; more of them have more loads under way and take more registers. warps: Triton's,
    of a program. registers: of a thread at most, None leaves them to the compiler (ptxas aims for
    more programs than there will be, and spills; told a number it does neither).
    """

    programs: int
    tile_atoms: int
    atoms: int
    warps: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What the compiler of a kernel is told."""
        asked = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **asked}

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """Atoms of a tile, and at once: every kernel that :func:`launches` may ask for."""
        sizes = sorted({1, self.atoms, self.tile_atoms})
        return [(size, min(size, self.atoms)) for size in sizes]

    def tile(self, atoms: int, programs: int) -> int:
        """Atoms of a tile, for so many of a segment: one, while two tiles one after the other are
        as quick as one with several at once; then those, until each program has a full tile."""
        if atoms >= self.tile_atoms * programs:
            return self.tile_atoms
        return self.atoms if atoms > 2 * programs else 1


CUDA = Tuning(programs=2, tile_atoms=16, atoms=4, warps=8, registers=128)
HIP = Tuning(programs=4, tile_atoms=16, atoms=1, warps=4)
"""Both have 256 threads in a program. HIP was chosen without hardware: from 16 KiB under way per
multiprocessor on, cuts are alike on H200, and with 2 atoms at once gfx942 is short of scalars."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


@dataclass(frozen=True)
class Buffer:
    """Layout of the buffer that every rank has and all ranks write to.

    segment_atoms: atoms of one segment that a two-shot launch can take. atom_bytes: of the format.
    one_shot_tiles: blocks of ONE_SHOT_BLOCK values that a one-shot launch can take.

    Raises:
        ValueError: it has 2 GiB or more; the kernels count its bytes in int32.
    """

    world: int
    segment_atoms: int
    atom_bytes: int
    one_shot_tiles: int

    def __post_init__(self) -> None:
        if self.nbytes >= 2**31:
            raise ValueError(
                f"a rank's buffer takes {self.nbytes} bytes, at most 2^31 - 1 are possible"
            )

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
    ``atoms`` of them at once, from atom ``first`` on."""

    first: int
    tiles: int
    tile_atoms: int
    atoms: int
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
        size = tuning.tile(atoms, programs)
        tiles = -(-atoms // size)
        yield Launch(first, tiles, size, min(size, tuning.atoms), min(tiles, programs))
