"""afd_comm over TCP: hostile and broken connections, stalled peers."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from comm_peer import TIMEOUT_US, peer, post
from comm_wire import FLAG, HELLO, VERSION, WELCOME, frame, hello, raw, tcp_address

from afd_comm import CommError, Link, Message, Region, Status, make_flag

SLOT_BYTES = 4096


@pytest.fixture
def region() -> Region:
    return Region(3, SLOT_BYTES, name="test", tcp_host="127.0.0.1")


def hung_up(s: socket.socket) -> bool:
    """Returns whether the region ends the connection; reads until then."""
    s.settimeout(3)
    try:
        while s.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def answers(region: Region) -> bool:
    """Returns whether a valid sender can still post, and only its own slot changes."""
    link = Link([tcp_address(region)], slots=(0, 1), timeout_us=TIMEOUT_US)
    seq = random.randrange(2, 2**32)
    data = np.frombuffer(random.randbytes(SLOT_BYTES), np.uint8)
    sent = post(link, 0, make_flag(1, seq), data) == Status.OK
    came = region.wait_all([0], [make_flag(1, seq)], TIMEOUT_US) == [Status.OK]
    return sent and came and np.array_equal(region.buffer(0), data)


def test_a_handmade_valid_frame_is_accepted(region: Region) -> None:
    """Positive control of the tests below: the same bytes without an error are accepted."""
    with raw(region, hello(region), frame(parts=((0, 4), (10, 4))) + b"abcdefgh") as s:
        assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.OK]
        assert bytes(region.buffer(1)[:14]) == b"abcd" + bytes(6) + b"efgh"
        assert struct.unpack("<IIiIQ", s.recv(24)) == (WELCOME, VERSION, 0, 3, SLOT_BYTES)


def switches(thread: str) -> int:
    """Returns how often this process's threads of that name went to sleep."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended meanwhile
            if (task / "comm").read_text().strip() == thread:
                status = (task / "status").read_text()
                total += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return total


def test_the_receiver_thread_sleeps_while_a_waiter_polls(region: Region) -> None:
    """If the thread woke for each message, it would compete with the waiter for a core."""
    last = make_flag(1, 100)
    with raw(region, hello(region), frame() + b"abcdefgh") as s:
        assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.OK]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(region.wait_all, [1], [last], TIMEOUT_US)
            time.sleep(0.1)
            before = switches("afd-tcp")
            for seq in range(2, 101):
                s.sendall(frame(flag=make_flag(1, seq), sequence=seq) + b"abcdefgh")
                time.sleep(0.001)
            assert waiting.result() == [Status.OK]
        assert switches("afd-tcp") - before < 10


def test_a_message_sent_byte_by_byte_arrives(region: Region) -> None:
    with raw(region) as s:
        for byte in hello(region) + frame() + b"abcdefgh":
            s.sendall(bytes([byte]))
        assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.OK]
        assert bytes(region.buffer(1)[:8]) == b"abcdefgh"


BAD_FRAMES = {
    "magic": frame(magic=1),
    "slot outside": frame(slot=3),
    "slot far outside": frame(slot=2**32 - 1),
    "slot not claimed": frame(slot=2),
    "flag 0": frame(flag=0),
    "part too long": frame(parts=((0, SLOT_BYTES + 1),)),
    "part beyond the end": frame(parts=((SLOT_BYTES - 1, 2),)),
    "offset overflows": frame(parts=((2**64 - 4, 8),)),
    "sizes overflow": frame(parts=((0, 2**63), (0, 2**63)), nbytes=0),
    "sum differs": frame(nbytes=9),
    "negative sum": frame(nbytes=-8),
    "too many parts": frame(part_count=9),
    "very many parts": frame(part_count=2**32 - 1),
    "stripe longer than its message": frame(nbytes=7, stripes=2),
    "no stripes": frame(stripes=0),
    "very many stripes": frame(stripes=2**32 - 1),
    "sequence before the first": frame(sequence=0),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frame_drops_the_connection(region: Region, name: str) -> None:
    with raw(region, hello(region), BAD_FRAMES[name]) as s:
        assert hung_up(s)
    assert region.wait_all([1], [make_flag(1, 2)], TIMEOUT_US) == [Status.PEER_GONE]
    assert not region.buffer(1).any() and not region.buffer(2).any()
    assert not region.ready(1, FLAG)
    assert answers(region)


def test_wrong_token_and_version(region: Region) -> None:
    host, port = tcp_address(region).split(":")[1:3]
    with pytest.raises(CommError, match="refused the connection"):
        Link([f"tcp:{host}:{port}:{'0' * 32}"], timeout_us=TIMEOUT_US)
    with raw(region, hello(region, version=9)) as s:
        assert struct.unpack("<II", s.recv(24)[:8]) == (WELCOME, VERSION)
        assert hung_up(s)


def test_random_bytes_leave_the_region_intact(region: Region) -> None:
    """3,000 random inputs without the token, and 500 random inputs after a valid greeting."""
    rng = random.Random(5)
    link = Link([tcp_address(region)], slots=(0, 1), timeout_us=TIMEOUT_US)
    data = np.arange(SLOT_BYTES, dtype=np.uint32).astype(np.uint8)
    assert post(link, 0, FLAG, data) == Status.OK
    assert region.wait_all([0], [FLAG], TIMEOUT_US) == [Status.OK]
    for i in range(3000):
        noise = rng.randbytes(rng.choice((1, 31, 32, 33, 200, 300)))
        if i % 3 == 0:
            noise = struct.pack("<II", HELLO, 1) + noise
        with suppress(ConnectionError), raw(region, noise):
            pass
    for i in range(500):
        mutated = bytearray(frame() + b"abcdefgh")
        for _ in range(rng.randrange(1, 5)):
            mutated[rng.randrange(144 if i % 2 else len(mutated))] = rng.randrange(256)
        with suppress(ConnectionError), raw(region, hello(region), bytes(mutated)):
            pass
    assert np.array_equal(region.buffer(0), data) and region.ready(0, FLAG)
    assert not region.buffer(2).any()
    assert post(link, 0, make_flag(1, 2), data) == Status.OK  # the valid link still works
    assert answers(region)


def test_silent_connections_do_not_block_others(region: Region) -> None:
    host, port = tcp_address(region).split(":")[1:3]
    silent = [socket.create_connection((host, int(port)), timeout=3) for _ in range(150)]
    assert answers(region)
    assert hung_up(silent[0])
    for s in silent:
        s.close()


def test_half_a_message_never_rings(region: Region) -> None:
    with raw(region, hello(region), frame() + b"abcd"):
        assert region.wait_all([1], [FLAG], 50_000) == [Status.DEADLINE]
    assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.PEER_GONE]


def test_a_post_to_a_stalled_receiver_ends_in_time() -> None:
    with peer("own", slots=1, slot_bytes=1 << 24, tcp=True) as owner:
        addresses = owner.read()
        link = Link(addresses, backend="tcp", slots=(0, 1), timeout_us=300_000)
        data = np.zeros(1 << 24, np.uint8)
        os.kill(owner.process.pid, signal.SIGSTOP)
        start = time.monotonic()
        status = Status.OK
        while status == Status.OK and time.monotonic() - start < 5:
            status = post(link, 0, FLAG, data)
        assert status == Status.DEADLINE
        assert time.monotonic() - start < 2
        # Half a frame was sent and cannot be withdrawn, so the link is closed.
        assert post(link, 0, FLAG, data) == Status.CLOSED
        start = time.monotonic()
        with pytest.raises(CommError, match="in time"):
            Link(addresses, backend="tcp", timeout_us=200_000)
        assert time.monotonic() - start < 1


def test_unusable_addresses_are_refused() -> None:
    with pytest.raises(CommError, match="wildcard"):
        Region(1, 64, name="w", tcp_host="0.0.0.0")
    with pytest.raises(CommError, match="cannot listen"):
        Region(1, 64, name="far", tcp_host="192.0.2.1")
    with pytest.raises(CommError, match="cannot resolve"):
        Region(1, 64, name="nowhere", tcp_host="no such host")
    taken = Region(1, 64, name="taken", tcp_host="127.0.0.1")
    port = int(tcp_address(taken).split(":")[2])
    with pytest.raises(CommError, match="free port"):
        Region(1, 64, name="second", tcp_host="127.0.0.1", tcp_port=port)
    taken.close()
    with pytest.raises(CommError, match="cannot connect"):
        Link(taken.addresses, backend="tcp", timeout_us=TIMEOUT_US)


def test_ipv6() -> None:
    try:
        region = Region(1, SLOT_BYTES, name="six", tcp_host="::1")
    except CommError:
        pytest.skip("this host has no IPv6 loopback")
    assert region.addresses[1].startswith("tcp:[::1]:")
    assert answers(region)


def test_registered_memory_is_sent_without_a_copy() -> None:
    """Random parts with and without zero copy; the memory changes after ``wait_sent`` returns."""
    rng = np.random.default_rng(2)
    nbytes = 3_000_000
    region = Region(2, nbytes, name="in place", tcp_host="127.0.0.1")
    link = Link(
        region.addresses, backend="tcp", slots=(0, 2), timeout_us=TIMEOUT_US, zero_copy_from=1000
    )
    registered = rng.integers(0, 256, nbytes, dtype=np.uint8)
    link.register_memory(registered.ctypes.data, nbytes)
    for seq in range(1, 61):
        start, end = np.sort(rng.integers(0, nbytes + 1, 2))
        other = rng.integers(0, 256, int(rng.integers(0, 5000)), dtype=np.uint8)
        where = int(nbytes - other.size)
        end = max(int(start), min(int(end), where))
        expected = np.concatenate([registered[start:end], other])
        parts = [
            (0, registered.ctypes.data + int(start), int(end - start)),
            (int(end - start), other.ctypes.data, other.size),
        ]
        slot, flag = seq % 2, make_flag(1, seq)
        assert link.post(Message(slot, parts), flag) == Status.OK
        assert link.wait_sent(slot, TIMEOUT_US) == Status.OK
        registered[start:end] += 1
        assert region.wait_all([slot], [flag], TIMEOUT_US) == [Status.OK]
        assert np.array_equal(region.buffer(slot)[: expected.size], expected)
    assert link.wait_sent(2, 0) == Status.BAD_HEADER


def test_wait_sent_returns_after_the_peer_was_killed() -> None:
    with peer("own", slots=1, slot_bytes=1 << 20, tcp=True) as owner:
        link = Link(
            owner.read(), backend="tcp", slots=(0, 1), timeout_us=TIMEOUT_US, zero_copy_from=1
        )
        data = np.zeros(1 << 20, np.uint8)
        link.register_memory(data.ctypes.data, data.nbytes)
        assert post(link, 0, FLAG, data) == Status.OK
        assert link.wait_sent(0, TIMEOUT_US) == Status.OK
        assert link.wait_sent(0, 0) == Status.OK
        owner.kill()
        status = Status.OK
        end = time.monotonic() + 2
        while status == Status.OK and time.monotonic() < end:
            status = post(link, 0, FLAG, data)
        assert status == Status.PEER_GONE
        assert link.wait_sent(0, TIMEOUT_US) == Status.OK  # the kernel no longer reads the memory
