"""How backend verbs splits a payload over its connections: properties on random inputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afd_comm._core import plan_staged, plan_stripes, stripe_length

STAGED = 256 << 10
MOST = 16


@given(
    nbytes=st.integers(0, 1 << 40),
    alive=st.integers(1, 0xFFFF),
    turn=st.integers(0, 1 << 31),
    least=st.integers(1, 1 << 30),
)
def test_stripes_cover_the_payload_once(nbytes: int, alive: int, turn: int, least: int) -> None:
    stripes = plan_stripes(nbytes, alive, turn, least)
    used = [qp for qp, _, _ in stripes]
    assert len(set(used)) == len(used) and all(alive >> qp & 1 for qp in used)
    end = 0
    for _, offset, length in stripes:
        assert offset == end and (offset % 64 == 0 or length == 0)
        end += length
    assert end == nbytes
    lengths = [length for _, _, length in stripes]
    assert len(stripes) <= max(1, nbytes // least)
    assert max(lengths) - min(lengths) <= 64 * len(stripes)
    assert all(length == stripe_length(nbytes, len(stripes), 64) for length in lengths[:-1])


@given(nbytes=st.integers(0, 64 << 20), alive=st.integers(1, 0xFFFF), turn=st.integers(0, 1 << 31))
def test_stripes_of_staged_messages(nbytes: int, alive: int, turn: int) -> None:
    """The receiver finds each stripe from their number. Each connection gets its share."""
    stripes = plan_staged(nbytes, alive, turn)
    length = stripe_length(nbytes, len(stripes), STAGED)
    assert length % STAGED == 0 and len(stripes) <= MOST
    assert length == max(STAGED, -(-nbytes // MOST // STAGED) * STAGED) or nbytes == 0
    for i, (_, begin, size) in enumerate(stripes):
        assert begin == min(i * length, nbytes)
        assert size == min(length, nbytes - begin)
    assert sum(size for _, _, size in stripes) == nbytes
    used = [qp for qp, _, _ in stripes]
    assert all(alive >> qp & 1 for qp in used)
    connections = alive.bit_count()
    assert all(used.count(qp) <= -(-len(used) // connections) for qp in used)


def test_small_messages_take_turns() -> None:
    assert [plan_stripes(64, 0b1011, turn, 1 << 16)[0][0] for turn in range(5)] == [0, 1, 3, 3, 0]


def test_large_payloads_use_every_connection() -> None:
    mib = 1 << 20
    assert plan_stripes(4 * mib, 0b1111, 1, 1 << 16) == [
        (1, 0, mib),
        (2, mib, mib),
        (3, 2 * mib, mib),
        (0, 3 * mib, mib),
    ]
