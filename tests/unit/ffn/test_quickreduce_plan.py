"""Segments, launches and buffer layout of quickreduce's two-shot kernels."""

import itertools
import random

import pytest

from ffn_worker.allreduce.base import row_shares
from ffn_worker.allreduce.formats_table import ATOM_VALUES, FORMATS
from ffn_worker.allreduce.quickreduce_plan import (
    CUDA,
    ONE_SHOT_BLOCK,
    Buffer,
    Segments,
    Tuning,
    flat_segments,
    launches,
    row_segments,
)


def bounds(segments: Segments, n: int, world: int) -> list[int]:
    """Returns the first value of every segment and the end, as the kernel computes them."""
    starts = [r * segments.base + min(r, segments.longer) for r in range(world + 1)]
    return [min(units * segments.unit, n) for units in starts]


@pytest.mark.parametrize("seed", range(40))
def test_every_atom_of_every_segment_is_in_one_tile(seed: int):
    rng = random.Random(seed)
    world, n = rng.randint(2, 8), rng.randint(1, 4_000_000)
    buffer = Buffer(world, rng.randint(1, 2000), 1152, 4)
    atoms = rng.choice([1, 2, 4])
    tuning = Tuning(rng.randint(1, 4), atoms * rng.choice([1, 4]), atoms, 8)
    segments = flat_segments(n, world)
    edges = bounds(segments, n, world)
    assert edges[0] == 0 and edges[-1] == n and edges == sorted(edges)
    longest = max(b - a for a, b in itertools.pairwise(edges))
    assert (segments.atoms - 1) * ATOM_VALUES < longest <= segments.atoms * ATOM_VALUES
    covered = 0
    for launch in launches(segments, buffer, 132, tuning):
        assert launch.first == covered
        assert 1 <= launch.programs <= min(launch.tiles, 132 * tuning.programs)
        assert launch.tile_atoms <= tuning.tile_atoms
        assert (launch.tile_atoms, launch.atoms) in tuning.cuts
        assert launch.tile_atoms % launch.atoms == 0
        assert launch.tiles <= buffer.segment_atoms  # each tile has a flag and a counter
        atoms = min(segments.atoms - covered, buffer.segment_atoms)
        assert (launch.tiles - 1) * launch.tile_atoms < atoms <= launch.tiles * launch.tile_atoms
        covered += atoms
    assert covered == segments.atoms


def test_a_buffer_beyond_int32_offsets_is_refused():
    with pytest.raises(ValueError, match=r"more than the limit of 2\^31 - 1"):
        Buffer(8, 1 << 20, 1152, 4)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 43])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_row_segments_equal_row_shares(rows: int, world: int):
    edges = bounds(row_segments(rows, 96, world), rows * 96, world)
    want = [(start * 96, end * 96) for start, end in row_shares(rows, world)]
    assert list(itertools.pairwise(edges)) == want


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_parts_of_the_buffer_do_not_overlap(fmt):
    for world in (2, 3, 4, 8):
        b = Buffer(world, 1000, fmt.atom_bytes, 64)
        assert 2 * b.segment_atoms * world * 4 <= b.two_shot_inbox
        assert b.two_shot_inbox + 2 * world * b.segment_bytes <= b.one_shot_flags
        assert b.one_shot_flags + 64 * world * 4 <= b.one_shot_inbox
        assert b.one_shot_inbox + 2 * world * 64 * ONE_SHOT_BLOCK * 4 <= b.nbytes
        offsets = (b.two_shot_inbox, b.segment_bytes, b.one_shot_flags, b.one_shot_inbox)
        assert all(offset % 16 == 0 for offset in offsets)


def test_small_messages_have_small_tiles():
    """Tiles become larger only if every program still has a tile."""
    buffer = Buffer(2, 100_000, 1152, 4)
    sizes = {n: [x.tile_atoms for x in launches(Segments(2048, n, 0), buffer, 132, CUDA)]
             for n in (8, 528, 529, 4223, 4224, 100_000)}  # fmt: skip
    assert sizes == {8: [1], 528: [1], 529: [4], 4223: [4], 4224: [16], 100_000: [16]}
