"""How backend verbs splits a payload over its connections: properties on random inputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afd_comm._core import plan_stripes


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
