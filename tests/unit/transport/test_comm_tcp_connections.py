"""afd_comm over several TCP connections per link: order, damage, and their end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import numpy as np
import pytest
from comm_peer import TIMEOUT_US, peer, post
from comm_wire import FLAG, frame, hello, raw, tcp_address

from afd_comm import Link, Message, Region, Status, make_flag

SLOT_BYTES = 2_000_000
LINK = 7


@pytest.fixture
def region() -> Region:
    return Region(3, SLOT_BYTES, name="test", tcp_host="127.0.0.1")


def linked(region: Region, connections: int, slots: tuple[int, int] = (0, 2)) -> Link:
    addresses = [tcp_address(region)]
    return Link(addresses, slots=slots, timeout_us=TIMEOUT_US, tcp_connections=connections)


@pytest.mark.parametrize("connections", [1, 2, 3, 8])
def test_random_messages_arrive_whole(region: Region, connections: int) -> None:
    """Random parts at random places, of any number and size."""
    rng = np.random.default_rng(connections)
    link = linked(region, connections)
    for seq in range(1, 61):
        most = int(rng.choice([100, 200_000, SLOT_BYTES]))
        cuts = np.sort(rng.integers(0, most + 1, 2 * int(rng.integers(1, 9))))
        data = rng.integers(0, 256, most, dtype=np.uint8)
        parts = [
            (int(start), data.ctypes.data + int(start), int(end - start))
            for start, end in zip(cuts[::2], cuts[1::2], strict=True)
        ]
        slot, flag = seq % 2, make_flag(1, seq)
        before = region.buffer(slot)[:most].copy()
        for start, _, nbytes in parts:
            before[start : start + nbytes] = data[start : start + nbytes]
        assert link.post(Message(slot, parts), flag) == Status.OK
        assert region.wait_all([slot], [flag], TIMEOUT_US) == [Status.OK]
        assert np.array_equal(region.buffer(slot)[:most], before)


def test_doorbells_ring_in_the_order_of_the_posts(region: Region) -> None:
    """A small message behind a large one takes the first connection at once, and still waits."""
    link = linked(region, 4)
    large, small = np.zeros(SLOT_BYTES, np.uint8), np.zeros(8, np.uint8)
    for seq in range(1, 101):
        large[:] = seq
        assert post(link, 0, make_flag(1, seq), large) == Status.OK
        assert post(link, 1, make_flag(1, seq), small) == Status.OK
        assert region.wait_all([1], [make_flag(1, seq)], TIMEOUT_US) == [Status.OK]
        assert region.ready(0, make_flag(1, seq))
        assert (region.buffer(0) == seq).all()


def test_a_slot_is_written_again_only_when_its_last_message_is_whole(region: Region) -> None:
    """Posts that wait for no answer: every message is either whole or not seen."""
    link = linked(region, 4)
    for seq in range(1, 201):
        data = np.full(random.randrange(SLOT_BYTES // 2, SLOT_BYTES), seq % 251, np.uint8)
        assert post(link, 0, make_flag(1, seq), data) == Status.OK
    assert region.wait_all([0], [make_flag(1, 200)], TIMEOUT_US) == [Status.OK]
    assert (region.buffer(0)[: data.size] == 200).all()


@contextmanager
def two_connections(region: Region) -> Iterator[tuple[socket, socket]]:
    with raw(region, hello(region, 1, 2, link=LINK)) as first:
        assert len(first.recv(24)) == 24
        with raw(region, hello(region, 1, 2, link=LINK, number=1)) as second:
            assert len(second.recv(24)) == 24
            yield first, second


def stripe(number: int, sequence: int = 1, slot: int = 1, of: int = 2, seq: int = 1) -> bytes:
    """Returns four bytes of a message of 4 * ``of`` bytes."""
    head = frame(slot, make_flag(1, seq), ((4 * number, 4),), 4 * of, stripes=of, sequence=sequence)
    return head + bytes([16 * seq + number] * 4)


def test_stripes_come_in_any_order(region: Region) -> None:
    with two_connections(region) as (first, second):
        first.sendall(stripe(1))
        assert region.wait_all([1], [FLAG], 50_000) == [Status.DEADLINE]
        second.sendall(stripe(0))
        assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.OK]
        assert bytes(region.buffer(1)[:8]) == bytes([16] * 4 + [17] * 4)


def test_a_later_message_waits_for_an_earlier_one(region: Region) -> None:
    later = make_flag(1, 2)
    with two_connections(region) as (first, second):
        second.sendall(stripe(0, 2, slot=2, seq=2) + stripe(1, 2, slot=2, seq=2))
        assert region.wait_all([2], [later], 50_000) == [Status.DEADLINE]
        first.sendall(stripe(0) + stripe(1))
        assert region.wait_all([1, 2], [FLAG, later], TIMEOUT_US) == [Status.OK] * 2


def test_a_later_message_of_the_slot_is_not_written_yet(region: Region) -> None:
    with two_connections(region) as (first, second):
        first.sendall(stripe(0))
        end = time.monotonic() + 5
        while not region.buffer(1)[0] and time.monotonic() < end:
            time.sleep(0.001)
        second.sendall(stripe(0, 2, seq=2) + stripe(1, 2, seq=2))
        time.sleep(0.05)
        assert bytes(region.buffer(1)[:8]) == bytes([16] * 4 + [0] * 4)
        first.sendall(stripe(1))
        assert region.wait_all([1], [make_flag(1, 2)], TIMEOUT_US) == [Status.OK]
        assert bytes(region.buffer(1)[:8]) == bytes([32] * 4 + [33] * 4)


def test_a_stripe_that_waits_ends_with_its_link(region: Region) -> None:
    with two_connections(region) as (first, second):
        first.sendall(stripe(0))
        second.sendall(stripe(0, 2, seq=2))
        time.sleep(0.05)
        first.close()
        assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.PEER_GONE]


WRONG = {
    "other slot": stripe(1, slot=2),
    "other flag": stripe(1, seq=2),
    "other number of stripes": stripe(1, of=3),
    "sequence that was": stripe(0, sequence=0),
    "bad magic": frame(magic=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_stripe_ends_the_link(region: Region, name: str) -> None:
    with two_connections(region) as (first, second):
        first.sendall(stripe(0))
        time.sleep(0.02)
        second.sendall(WRONG[name])
        first.settimeout(3)
        assert first.recv(1) == b""
        second.settimeout(3)
        assert second.recv(1) == b""
    assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.PEER_GONE]


def test_stripes_that_are_less_than_their_message_end_the_link(region: Region) -> None:
    short = frame(1, FLAG, ((0, 4),), 9, stripes=2) + b"abcd"
    with two_connections(region) as (first, second):
        first.sendall(short)
        second.sendall(short)
        assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.PEER_GONE]


@pytest.mark.parametrize("which", [0, 1])
def test_a_link_ends_with_any_of_its_connections(region: Region, which: int) -> None:
    with two_connections(region) as ends:
        ends[which].close()
        assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.PEER_GONE]


@pytest.mark.parametrize("greeting", [{"link": 8, "number": 1}, {"link": LINK, "number": 8}])
def test_a_connection_without_its_link_is_refused(region: Region, greeting: dict[str, int]) -> None:
    with two_connections(region) as (first, _):
        with raw(region, hello(region, 1, 2, **greeting)) as other:
            answer = b""
            while data := other.recv(64):
                answer += data
            assert len(answer) == 24
        first.sendall(stripe(0) + stripe(1))
        assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.OK]


def test_a_newer_link_takes_the_slots(region: Region) -> None:
    old = linked(region, 3)
    data = np.ones(SLOT_BYTES, np.uint8)
    assert post(old, 0, make_flag(1, 1), data) == Status.OK
    new = linked(region, 3)
    assert post(new, 0, make_flag(2, 1), data * 2) == Status.OK
    assert region.wait_all([0], [make_flag(2, 1)], TIMEOUT_US) == [Status.OK]
    assert post(old, 0, make_flag(1, 2), data) == Status.CLOSED
    assert (region.buffer(0) == 2).all()
    assert post(new, 1, make_flag(2, 2), data) == Status.OK


def test_a_stopped_and_a_killed_receiver() -> None:
    with peer("own", slots=1, slot_bytes=1 << 24, tcp=True) as owner:
        link = Link(
            owner.read(), backend="tcp", slots=(0, 1), timeout_us=300_000, tcp_connections=4
        )
        data = np.zeros(1 << 24, np.uint8)
        os.kill(owner.process.pid, signal.SIGSTOP)
        start = time.monotonic()
        status = Status.OK
        while status == Status.OK and time.monotonic() - start < 10:
            status = post(link, 0, FLAG, data)
        assert status == Status.DEADLINE
        assert post(link, 0, FLAG, data) == Status.CLOSED
    with peer("own", slots=1, slot_bytes=1 << 24, tcp=True) as owner:
        link = Link(
            owner.read(), backend="tcp", slots=(0, 1), timeout_us=TIMEOUT_US, tcp_connections=4
        )
        assert post(link, 0, FLAG, data) == Status.OK
        owner.kill()
        status = Status.OK
        end = time.monotonic() + 2
        while status == Status.OK and time.monotonic() < end:
            status = post(link, 0, FLAG, data)
        assert status == Status.PEER_GONE


def test_the_number_of_connections_is_checked(region: Region) -> None:
    with pytest.raises(ValueError, match="tcp_connections must be 0"):
        linked(region, 9)
