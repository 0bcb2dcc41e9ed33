"""afd_comm groups: broadcast and scatter give the same result as one post per link."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from comm_peer import TIMEOUT_US, peer, post

from afd_comm import USER_BYTES, CommError, Group, Link, Message, Region, Status, make_flag

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
        assert (
            group.broadcast(Message(1, parts, bytes([seq] * 3), 9), flags) == (Status.OK,) * PEERS
        )
        for region, flag in zip(regions, flags, strict=True):
            assert arrived(region, flag)
            h = region.header(1)
            user = bytes([seq] * 3) + bytes(USER_BYTES - 3)
            assert (h.user, h.count, h.nbytes) == (user, 9, data.nbytes)
            assert np.array_equal(region.buffer(1)[: data.size], data)


def test_scatter_gives_each_link_its_items(regions: list[Region], backends: list[str]) -> None:
    group = Group(links_to(regions, backends), timeout_us=TIMEOUT_US)
    rng = np.random.default_rng(1)
    for seq in range(1, 11):
        counts = [int(n) for n in rng.integers(0, 50, PEERS)]
        x = rng.integers(0, 256, (sum(counts), 640), dtype=np.uint8)
        ids = rng.integers(0, 2**31, (sum(counts), 8), dtype=np.int32)
        parts = [(64, x.ctypes.data, 640), (500_000, ids.ctypes.data, 32)]
        flags = [make_flag(1, seq)] * PEERS
        if seq % 3 == 0:
            flags[1] = 0  # flag 0 leaves this link out: its items are skipped
        assert group.scatter(Message(1, parts), flags, counts) == (Status.OK,) * PEERS
        start = 0
        for region, flag, n in zip(regions, flags, counts, strict=True):
            if flag:
                assert arrived(region, flag)
                assert (region.header(1).count, region.header(1).nbytes) == (n, n * 672)
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
    got = group.broadcast(Message(1, parts), flags)
    assert got == (Status.OK, Status.PEER_GONE, Status.CLOSED)
    assert arrived(regions[0], FLAG)
    too_large = [(SLOT_BYTES - 63, data.ctypes.data, 64)]
    assert group.broadcast(Message(1, too_large), [FLAG, 0, 0])[0] == Status.CAPACITY
    huge = [(0, data.ctypes.data, 2**62)]
    assert group.scatter(Message(1, huge), [FLAG, 0, 0], [4, 0, 0])[0] == Status.CAPACITY


def test_wrong_lists_are_refused(regions: list[Region]) -> None:
    links = links_to(regions, ["shm"] * PEERS)
    with pytest.raises(CommError, match="twice"):
        Group([links[0], links[0]], timeout_us=TIMEOUT_US)
    group = Group(links, timeout_us=TIMEOUT_US)
    message = Message(0, [])
    with pytest.raises(ValueError, match="flags has 1 entries; the group has 3 links"):
        group.broadcast(message, [FLAG])
    with pytest.raises(ValueError, match="counts has 2"):
        group.scatter(message, [FLAG] * 3, [1, 2])
    with pytest.raises(ValueError, match="counts must lie"):
        group.scatter(message, [FLAG] * 3, [1, 2, -1])
    with pytest.raises(ValueError, match="answer_to has 0"):
        group.broadcast(message, [FLAG] * 3, [])


def stop(pid: int) -> None:
    """Stops a process; returns once none of its threads runs: until then it may go on reading."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    while any((t / "stat").read_text().rpartition(")")[2].split()[0] != "T" for t in threads):
        time.sleep(0.001)


def test_a_stopped_peer_does_not_delay_the_others() -> None:
    """The message exceeds the socket buffer of the stopped peer; the other peer gets it at once."""
    nbytes = 1 << 24
    region = Region(1, nbytes, name="live", tcp_host="127.0.0.1")
    with peer("own", slots=1, slot_bytes=nbytes, tcp=True) as stopped:
        addresses = [stopped.read(), region.addresses]
        links = [Link(a, backend="tcp", slots=(0, 1), timeout_us=TIMEOUT_US) for a in addresses]
        group = Group(links, timeout_us=400_000)
        data = np.ones(nbytes, np.uint8)
        stop(stopped.process.pid)
        start = time.monotonic()
        parts = [(0, data.ctypes.data, nbytes)]
        got = group.broadcast(Message(0, parts), [FLAG, FLAG])
        assert got == (Status.DEADLINE, Status.OK)
        assert 0.3 < time.monotonic() - start < 1.5
        assert region.wait_all([0], [FLAG], 0) == [Status.OK]
        assert post(links[0], 0, make_flag(1, 2), data) == Status.CLOSED  # half a frame was sent
