"""Pipeline decisions: the order of calls, the depth of a step, and prefix hazards."""

from hypothesis import given
from hypothesis import strategies as st

from afd.schedule import Position, choose_depth, reads_block_written_in_step, walk


def test_walk_goes_layer_by_layer_and_micro_batch_by_micro_batch():
    assert [(p.layer, p.micro_batch) for p in walk([1, 3], 2)] == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_walk_resumes_in_the_middle():
    start = Position(3, 1)
    assert list(walk([1, 3, 4], 2, start)) == [Position(3, 1), Position(4, 0), Position(4, 1)]


@given(
    tokens=st.integers(1, 4096),
    requests=st.integers(1, 256),
    depth=st.integers(1, 3),
    rows=st.integers(1, 64),
)
def test_depth_never_makes_a_micro_batch_smaller_than_min_rows(tokens, requests, depth, rows):
    chosen = choose_depth(tokens, requests, depth, rows)
    assert 1 <= chosen <= depth
    assert chosen == 1 or tokens // chosen >= rows


def test_depth_of_small_decode_batches():
    assert [choose_depth(n, n, 3, 4) for n in (1, 4, 8, 11, 12, 64)] == [1, 1, 2, 2, 3, 3]


def test_an_unsplittable_step_runs_at_depth_one():
    assert choose_depth(1000, 10, 3, 4, splittable=False) == 1


def test_hazard_only_when_a_cached_prefix_is_written_in_the_same_step():
    assert reads_block_written_in_step([[1, 2]], [[7], [2, 3]])
    assert not reads_block_written_in_step([[1, 2]], [[7], [3]])
    assert not reads_block_written_in_step([], [[1]])
    assert not reads_block_written_in_step([[]], [[1]])
