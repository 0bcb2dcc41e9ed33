"""afd_comm groups: broadcast and scatter against one post per link."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from comm_peer import TIMEOUT_US, peer, post

from afd_comm import CommError, Group, Link, Region, Status, make_flag

SLOT_BYTES = 1 << 20
FLAG = make_flag(1, 1)
PEERS = 3
BACKENDS = {"shm": ["shm"] * PEERS, "tcp": ["tcp"] * PEERS, "mixed": ["shm", "tcp", "shm"]}


@pytest.fixture(params=BACKENDS)
def backends(request: pytest.FixtureRequest) -> list[str]:
    return BACKENDS[request.param]


@pytest.fixture
def regions() -> Iterator[list[Region]]:
    made = [Region(2, SLOT_BYTES, name=f"r{i}", tcp_host="127.0.0.1") for i in range(PEERS)]
    yield made
    for region in made:
        region.close()


def links_to(regions: list[Region], backends: list[str]) -> list[Link]:
    return [
        Link(r.addresses, backend=b, slots=(0, 2), timeout_us=TIMEOUT_US)
        for r, b in zip(regions, backends, strict=True)
    ]


def arrived(region: Region, flag: int, slot: int = 1) -> bool:
    return region.wait_all([slot], [flag], TIMEOUT_US) == [Status.OK]


def test_broadcast_equals_one_post_per_link(regions: list[Region], backends: list[str]) -> None:
    group = Group(links_to(regions, backends), timeout_us=TIMEOUT_US)
    assert len(group) == PEERS
    rng = np.random.default_rng(0)
    for seq in range(1, 11):
        data = rng.integers(0, 256, int(rng.integers(1, SLOT_BYTES)), dtype=np.uint8)
        flags = [make_flag(i + 1, seq) for i in range(PEERS)]
        parts = [(0, data.ctypes.data, data.nbytes)]
        assert group.broadcast(1, flags, 5, 2, 9, 3, 1, 4, seq, parts) == (Status.OK,) * PEERS
        for region, flag in zip(regions, flags, strict=True):
            assert arrived(region, flag)
            h = region.header(1)
            assert (h.layer, h.micro_batch, h.rows, h.depth, h.kind, h.dtype) == (5, 2, 9, 3, 1, 4)
            assert (h.step, h.nbytes) == (seq, data.nbytes)
            assert np.array_equal(region.buffer(1)[: data.size], data)


def test_scatter_gives_each_link_its_rows(regions: list[Region], backends: list[str]) -> None:
    group = Group(links_to(regions, backends), timeout_us=TIMEOUT_US)
    rng = np.random.default_rng(1)
    for seq in range(1, 11):
        rows = [int(n) for n in rng.integers(0, 50, PEERS)]
        x = rng.integers(0, 256, (sum(rows), 640), dtype=np.uint8)
        ids = rng.integers(0, 2**31, (sum(rows), 8), dtype=np.int32)
        parts = [(64, x.ctypes.data, 640), (500_000, ids.ctypes.data, 32)]
        flags = [make_flag(1, seq)] * PEERS
        if seq % 3 == 0:
            flags[1] = 0  # left out, its rows are skipped
        assert group.scatter(1, flags, 0, 0, rows, 1, 0, 0, 0, parts) == (Status.OK,) * PEERS
        start = 0
        for region, flag, n in zip(regions, flags, rows, strict=True):
            if flag:
                assert arrived(region, flag)
                assert (region.header(1).rows, region.header(1).nbytes) == (n, n * 672)
                got = region.buffer(1)
                assert np.array_equal(got[64 : 64 + n * 640], x[start : start + n].reshape(-1))
                got_ids = got[500_000 : 500_000 + n * 32].view(np.int32)
                assert np.array_equal(got_ids, ids[start : start + n].reshape(-1))
            start += n


def test_each_link_has_its_own_outcome(regions: list[Region], backends: list[str]) -> None:
    links = links_to(regions, backends)
    group = Group(links, timeout_us=TIMEOUT_US)
    data = np.ones(64, np.uint8)
    parts = [(0, data.ctypes.data, data.nbytes)]
    regions[1].close()
    links[2].close()
    flags = [FLAG] * PEERS
    got = group.broadcast(1, flags, 0, 0, 1, 1, 0, 0, 0, parts)
    assert got == (Status.OK, Status.PEER_GONE, Status.CLOSED)
    assert arrived(regions[0], FLAG)
    too_large = [(SLOT_BYTES - 63, data.ctypes.data, 64)]
    assert group.broadcast(1, [FLAG, 0, 0], 0, 0, 1, 1, 0, 0, 0, too_large)[0] == Status.CAPACITY
    huge = [(0, data.ctypes.data, 2**62)]
    assert group.scatter(1, [FLAG, 0, 0], 0, 0, [4, 0, 0], 1, 0, 0, 0, huge)[0] == Status.CAPACITY


def test_wrong_lists_are_refused(regions: list[Region]) -> None:
    links = links_to(regions, ["shm"] * PEERS)
    with pytest.raises(CommError, match="twice"):
        Group([links[0], links[0]], timeout_us=TIMEOUT_US)
    group = Group(links, timeout_us=TIMEOUT_US)
    with pytest.raises(ValueError, match="flags has 1 entries, the group 3"):
        group.broadcast(0, [FLAG], 0, 0, 0, 1, 0, 0, 0, [])
    with pytest.raises(ValueError, match="rows has 2"):
        group.scatter(0, [FLAG] * 3, 0, 0, [1, 2], 1, 0, 0, 0, [])
    with pytest.raises(ValueError, match="rows must lie"):
        group.scatter(0, [FLAG] * 3, 0, 0, [1, 2, -1], 1, 0, 0, 0, [])
    with pytest.raises(ValueError, match="answer_to has 0"):
        group.broadcast(0, [FLAG] * 3, 0, 0, 0, 1, 0, 0, 0, [], [])


def test_a_stopped_peer_does_not_hold_up_the_others() -> None:
    """More than a socket takes goes to a stopped process first; the live one has it at once."""
    nbytes = 1 << 24
    region = Region(1, nbytes, name="live", tcp_host="127.0.0.1")
    with peer("own", slots=1, slot_bytes=nbytes, tcp=True) as stopped:
        addresses = [stopped.read(), region.addresses]
        links = [Link(a, backend="tcp", slots=(0, 1), timeout_us=TIMEOUT_US) for a in addresses]
        group = Group(links, timeout_us=400_000)
        data = np.ones(nbytes, np.uint8)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        start = time.monotonic()
        parts = [(0, data.ctypes.data, nbytes)]
        got = group.broadcast(0, [FLAG, FLAG], 0, 0, 1, 1, 0, 0, 0, parts)
        assert got == (Status.DEADLINE, Status.OK)
        assert 0.3 < time.monotonic() - start < 1.5
        assert region.wait_all([0], [FLAG], 0) == [Status.OK]
        assert post(links[0], 0, make_flag(1, 2), data) == Status.CLOSED  # half a frame is out
