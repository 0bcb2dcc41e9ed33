"""Arguments of the quickreduce kernels: buffer layout, segments of the ranks, and launches.

Pure, without torch. The kernels are described in :mod:`ffn_worker.allreduce.quickreduce_triton`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ffn_worker.allreduce.formats_table import ATOM_VALUES

ONE_SHOT_BLOCK = 1024
"""Values that one program of the one-shot kernel sums."""
MOST_VALUES = 2**31 - 2**24
"""Most values of a two-shot message: indices, also past the end of the last segment, are int32."""
_VALUE_BYTES = 4


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of the two-shot kernel. `afd bench allreduce --sweep` compares some.

    programs: per multiprocessor or compute unit. So few that all programs of a launch run at once:
        a waiting program must not keep another from starting.
    tile_atoms: most atoms of a tile.
    atoms: atoms handled at once, a power of two that divides tile_atoms. More atoms have more loads
        in flight and need more registers.
    warps: Triton warps of a program.
    registers: most registers of a thread; None: the compiler decides. Without a number, ptxas aims
        for a higher occupancy than there will be, and spills.
    """

    programs: int
    tile_atoms: int
    atoms: int
    warps: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Options for Triton's compiler."""
        asked = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **asked}

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """(atoms of a tile, atoms at once) of every kernel that :func:`launches` may use."""
        sizes = sorted({1, self.atoms, self.tile_atoms})
        return [(size, min(size, self.atoms)) for size in sizes]

    def tile(self, atoms: int, programs: int) -> int:
        """Returns the atoms of a tile for a segment of ``atoms`` atoms.

        One atom, as long as a program has at most two tiles: two such tiles in sequence are as fast
        as one tile with several atoms at once. ``self.atoms`` for larger segments, and the full
        tile as soon as every program gets one.
        """
        if atoms >= self.tile_atoms * programs:
            return self.tile_atoms
        return self.atoms if atoms > 2 * programs else 1


CUDA = Tuning(programs=2, tile_atoms=16, atoms=4, warps=8, registers=128)
HIP = Tuning(programs=4, tile_atoms=16, atoms=1, warps=4)
"""Both have 256 threads per program. HIP was chosen without hardware: on H200 all settings with at
least 16 KiB in flight per multiprocessor are equally fast, and with 2 atoms at once gfx942 runs out
of scalar registers."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


@dataclass(frozen=True)
class Buffer:
    """Layout of a rank's buffer, which all ranks write to.

    segment_atoms: most atoms of a segment per two-shot launch. atom_bytes: of the format.
    one_shot_tiles: most blocks of ONE_SHOT_BLOCK values per one-shot launch.

    Raises:
        ValueError: the buffer has 2 GiB or more; byte offsets in the kernels are int32.
    """

    world: int
    segment_atoms: int
    atom_bytes: int
    one_shot_tiles: int

    def __post_init__(self) -> None:
        if self.nbytes >= 2**31:
            raise ValueError(
                f"a rank's buffer takes {self.nbytes} bytes, more than the limit of 2^31 - 1"
            )

    @property
    def segment_bytes(self) -> int:
        return self.segment_atoms * self.atom_bytes

    @property
    def two_shot_inbox(self) -> int:
        """Offset of the two-shot inboxes, behind flags int32 [2 shots, segment_atoms, world]."""
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
    """Which rank sums which values: in order, each rank has ``base`` units of ``unit`` values, and
    the first ``longer`` ranks have one unit more."""

    unit: int
    base: int
    longer: int

    @property
    def atoms(self) -> int:
        """Atoms of the longest segment."""
        return -(-(self.base + (self.longer > 0)) * self.unit // ATOM_VALUES)


def flat_segments(n: int, world: int) -> Segments:
    """The segments of an all-reduce: n values in whole atoms."""
    return Segments(ATOM_VALUES, *divmod(-(-n // ATOM_VALUES), world))


def row_segments(rows: int, hidden: int, world: int) -> Segments:
    """The segments of a reduce-scatter: those of ``row_shares``."""
    return Segments(hidden, *divmod(rows, world))


@dataclass(frozen=True)
class Launch:
    """One launch of the two-shot kernel, from atom ``first`` of every segment on.

    tiles: number of tiles of ``tile_atoms`` atoms per segment. atoms: atoms handled at once.
    programs: grid size.
    """

    first: int
    tiles: int
    tile_atoms: int
    atoms: int
    programs: int


def launches(
    segments: Segments, buffer: Buffer, processors: int, tuning: Tuning
) -> Iterator[Launch]:
    """Yields as few launches as the buffer allows.

    Tiles grow once there are enough for all programs, because larger tiles need fewer flags.

    processors: multiprocessors or compute units of the device.
    """
    programs = tuning.programs * processors
    for first in range(0, segments.atoms, buffer.segment_atoms):
        atoms = min(buffer.segment_atoms, segments.atoms - first)
        size = tuning.tile(atoms, programs)
        tiles = -(-atoms // size)
        yield Launch(first, tiles, size, min(size, tuning.atoms), min(tiles, programs))
