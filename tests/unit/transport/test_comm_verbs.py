"""Backend verbs over the fake libibverbs: striping, failover, claims, error messages."""

from __future__ import annotations

import errno
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from fake_verbs import FakeVerbs, built_fake

from afd_comm import USER_BYTES, CommError, Link, Message, Region, Status, make_flag

TIMEOUT_US = 5_000_000
SLOT_BYTES = 4 << 20


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeVerbs]:
    with built_fake(tmp_path_factory.mktemp("verbs")) as fake:
        yield fake


@pytest.fixture
def fake(compiled: FakeVerbs) -> Iterator[FakeVerbs]:
    yield compiled
    compiled.heal()


@pytest.fixture
def region(fake: FakeVerbs) -> Iterator[Region]:
    made = Region(4, SLOT_BYTES, name="test", verbs=fake.options())
    yield made
    made.close()


def connect(region: Region, fake: FakeVerbs, slots=(0, 4), **options) -> Link:
    return Link(
        region.addresses,
        backend="verbs",
        slots=slots,
        timeout_us=TIMEOUT_US,
        verbs=fake.options(**options),
    )


class Sender:
    """Posts random payloads in several parts and checks the received bytes."""

    def __init__(self, region: Region, link: Link, seed: int = 1) -> None:
        self.region, self.link = region, link
        self.random = np.random.default_rng(seed)
        self.seq = 0

    def exchange(self, nbytes: int, slot: int = 0, data: np.ndarray | None = None) -> None:
        self.seq += 1
        flag = make_flag(1, self.seq)
        if data is None:
            data = self.random.integers(0, 256, nbytes, dtype=np.uint8)
        gap, cut = 128, nbytes // 3
        parts = [
            (0, data.ctypes.data, cut),
            (cut + gap, data.ctypes.data + cut, nbytes - cut),
        ]
        user = self.random.bytes(USER_BYTES)
        assert self.link.post(Message(slot, parts, user, 5), flag) == Status.OK
        assert self.region.wait_all([slot], [flag], TIMEOUT_US) == [Status.OK]
        header = self.region.header(slot)
        assert (header.user, header.count, header.nbytes) == (user, 5, nbytes)
        came = self.region.buffer(slot)
        assert np.array_equal(came[:cut], data[:cut])
        assert np.array_equal(came[cut + gap : nbytes + gap], data[cut:])


def ends_with(link: Link, end: Status) -> bool:
    """Returns whether posts soon return ``end``; the other side's notice takes a moment."""
    deadline = time.monotonic() + 2
    while (status := link.post(Message(0, []), 1)) == Status.OK:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return status == end


# -- error messages


def test_region_options_that_are_refused(fake: FakeVerbs) -> None:
    def refused(sentence: str, **changes: object) -> None:
        with pytest.raises(CommError, match=sentence):
            Region(1, 64, name="r", verbs=fake.options(**changes))

    refused("no RDMA device 'mlx5_0' on this host; it has: fake0, fake1", ports=["mlx5_0"])
    refused("fake0 has no port 2; ports are counted from 1", ports=["fake0:2"])
    refused("port fake0:1 has no address at gid_index 3; `afd doctor`", gid_index=3)
    refused("verbs host '0.0.0.0' is a wildcard", host="0.0.0.0")
    fake.refuse_memory(errno.ENOMEM)
    refused("limit of locked memory is .*ulimit -l unlimited")
    fake.devices(0)
    refused("no RDMA device on this host; check that the NIC's driver")
    assert fake.queue_pairs == 0


def test_link_options_that_are_refused(region: Region, fake: FakeVerbs) -> None:
    with pytest.raises(CommError, match="given no verbs options; name this host's ports"):
        Link(region.addresses, backend="verbs", timeout_us=TIMEOUT_US)
    with pytest.raises(CommError, match="18 queue pairs; at most 16"):
        connect(region, fake, qps_per_port=9)
    with pytest.raises(CommError, match=r"refused: slots 2 to 9 exceed the region.*has 4 slots"):
        connect(region, fake, slots=(2, 8))
    plain = Region(1, 64, name="plain")
    with pytest.raises(CommError, match="offers no address for backend 'verbs'"):
        connect(plain, fake, slots=(0, 1))
    fake.refuse_memory(errno.ENOMEM)
    with pytest.raises(CommError, match=r"limit of locked memory is .*ulimit -l unlimited"):
        connect(region, fake)
    fake.refuse_memory(0)
    fake.port("fake0", up=False)
    fake.port("fake1", up=False)
    with pytest.raises(CommError, match=r"no pair of ports.*fake0:1 is down.*fake1:1 is down"):
        connect(region, fake)


# -- messages


@pytest.mark.parametrize("delay_us", [0, 300])
def test_payloads_of_all_sizes(region: Region, fake: FakeVerbs, delay_us: int) -> None:
    fake.delay_us(delay_us)  # connections overtake each other
    link = connect(region, fake)
    assert link.backend == "verbs" and link.notes == ""
    sender = Sender(region, link)
    for nbytes in (3, 64, 219, 4096, 65535, 131072, 1 << 20, SLOT_BYTES - 128):
        sender.exchange(nbytes, slot=nbytes % 4)


def test_doorbells_ring_in_the_order_of_the_posts(region: Region, fake: FakeVerbs) -> None:
    """Without ordering, a small message would overtake a large one on another connection."""
    fake.delay_us(500)
    link = connect(region, fake)
    large = np.zeros(2 << 20, np.uint8)
    for seq in range(1, 21):
        flag = make_flag(1, seq)
        parts = [(0, large.ctypes.data, large.nbytes)]
        assert link.post(Message(seq % 2, parts), flag) == Status.OK
        for slot in (2, 3):
            assert link.post(Message(slot, []), flag) == Status.OK
        assert region.wait_all([3], [flag], TIMEOUT_US) == [Status.OK]
        assert region.ready(2, flag) and region.ready(seq % 2, flag)


def test_an_overwritten_message_does_not_block_later_ones(region: Region, fake: FakeVerbs) -> None:
    fake.delay_us(200)
    link = connect(region, fake)
    data = np.zeros(300_000, np.uint8)
    parts = [(0, data.ctypes.data, data.nbytes)]
    for seq in range(1, 201):
        assert link.post(Message(seq % 3, parts[: seq % 2]), seq) == Status.OK
    assert region.wait_all([0, 1, 2], [198, 199, 200], TIMEOUT_US) == [Status.OK] * 3


def test_one_unseen_overwrite_per_slot_is_harmless(region: Region, fake: FakeVerbs) -> None:
    link = connect(region, fake)
    fake.stop_receivers()
    for slot in (0, 1):
        for seq in (1, 2):
            assert link.post(Message(slot, []), seq) == Status.OK
    fake.stop_receivers(False)
    assert region.wait_all([0, 1], [2, 2], TIMEOUT_US) == [Status.OK] * 2
    Sender(region, link).exchange(1 << 20)


def test_two_unseen_overwrites_of_a_slot_end_the_link(region: Region, fake: FakeVerbs) -> None:
    """A stopped receiver cannot know which messages it missed, so both sides must see the end."""
    link = connect(region, fake)
    fake.stop_receivers()
    for seq in (1, 2, 3):
        assert link.post(Message(0, []), seq) == Status.OK
    assert link.wait_sent(0, TIMEOUT_US) == Status.OK  # all three were delivered
    fake.stop_receivers(False)
    assert region.wait_all([0, 1], [3, 3], TIMEOUT_US) == [Status.PEER_GONE] * 2
    assert ends_with(link, Status.PEER_GONE)
    Sender(region, connect(region, fake)).exchange(1 << 20)


def test_posts_to_a_stopped_receiver_end_in_time(region: Region, fake: FakeVerbs) -> None:
    """Posts succeed until the receive queues are full; the next one ends at its deadline."""
    link = Link(
        region.addresses, backend="verbs", slots=(0, 4), timeout_us=200_000, verbs=fake.options()
    )
    fake.stop_receivers()
    started, status, count = time.monotonic(), Status.OK, 0
    while status == Status.OK and count < 10_000:
        count += 1
        status = link.post(Message(count % 4, []), count)
    assert status == Status.DEADLINE and time.monotonic() - started < 3
    assert region.wait_all([0], [99_999], 100_000) == [Status.DEADLINE]
    fake.stop_receivers(False)
    assert region.wait_all([0], [99_999], TIMEOUT_US) == [Status.PEER_GONE]


def test_registered_memory_is_sent_in_place(region: Region, fake: FakeVerbs) -> None:
    fake.delay_us(20_000)
    link = connect(region, fake)
    data = np.zeros(1 << 20, np.uint8)
    link.register_memory(data.ctypes.data, data.nbytes)
    flag = make_flag(1, 1)
    parts = [(0, data.ctypes.data, data.nbytes)]
    assert link.post(Message(0, parts), flag) == Status.OK
    assert link.wait_sent(0, 0) == Status.DEADLINE
    data[:] = 9  # changed before wait_sent: the NIC reads the memory in place
    assert link.wait_sent(0, TIMEOUT_US) == Status.OK
    assert region.wait_all([0], [flag], TIMEOUT_US) == [Status.OK]
    assert (region.buffer(0)[: data.nbytes] == 9).all()
    plain = np.full(1 << 20, 3, np.uint8)
    flag = make_flag(1, 2)
    parts = [(0, plain.ctypes.data, plain.nbytes)]
    assert link.post(Message(0, parts), flag) == Status.OK
    plain[:] = 4  # post() copied it
    assert region.wait_all([0], [flag], TIMEOUT_US) == [Status.OK]
    assert (region.buffer(0)[: plain.nbytes] == 3).all()
    assert link.wait_sent(99, 0) == Status.BAD_HEADER


def test_traced_messages_carry_their_times(region: Region, fake: FakeVerbs) -> None:
    link = connect(region, fake)
    sender = Sender(region, link)
    sender.exchange(64)
    assert region.header(0).t_arrived == 0
    link.trace = True
    sender.exchange(64)
    header = region.header(0)
    assert 0 < header.t_posted <= header.t_sent <= header.t_arrived


# -- failures


def test_a_port_fails_in_mid_run(region: Region, fake: FakeVerbs) -> None:
    link = connect(region, fake)
    sender = Sender(region, link)
    stop = threading.Event()

    def saboteur() -> None:
        time.sleep(0.05)
        fake.port("fake1", up=False)
        stop.wait(0.2)
        stop.set()

    thread = threading.Thread(target=saboteur)
    thread.start()
    rng = random.Random(3)
    while not stop.is_set():
        sender.exchange(rng.choice((64, 5000, 300_000, 2 << 20)), slot=rng.randrange(4))
    thread.join()
    fresh = connect(region, fake)
    assert "port fake1:1 is down" in fresh.notes
    assert ends_with(link, Status.CLOSED)
    sender = Sender(region, fresh)
    sender.seq = 1 << 20
    sender.exchange(1 << 20)


def test_lost_acknowledgements_deliver_once(region: Region, fake: FakeVerbs) -> None:
    """The stripes had arrived, so a retry must not overwrite later data with them."""
    link = connect(region, fake)
    sender = Sender(region, link)
    sender.exchange(1 << 20)
    fake.lose_acks("fake0")
    for nbytes in (1 << 20, 64, 300_000):
        sender.exchange(nbytes)
        assert link.wait_sent(0, TIMEOUT_US) == Status.OK
        mark = np.full(1 << 20, 0xEE, np.uint8)
        region.buffer(0)[: mark.size] = mark
        time.sleep(0.02)
        assert (region.buffer(0)[: mark.size] == 0xEE).all()


def test_a_nic_that_reports_nothing(region: Region, fake: FakeVerbs) -> None:
    """The link gives up its paths once the port is down, and sends again. Before, it waits."""
    link = connect(region, fake, timeout=1)
    Sender(region, link).exchange(1 << 20)
    fake.mute("fake1")
    data = np.arange(1 << 20, dtype=np.uint8)
    assert link.post(Message(0, [(0, data.ctypes.data, data.nbytes)]), make_flag(1, 2)) == Status.OK
    assert region.wait_all([0], [make_flag(1, 2)], 2_500_000) == [Status.DEADLINE]
    assert link.notes == ""
    fake.port("fake1", up=False)
    assert region.wait_all([0], [make_flag(1, 2)], TIMEOUT_US) == [Status.OK]
    assert np.array_equal(region.buffer(0)[: data.nbytes], data)
    assert link.notes.count("path fake1:1 to fake1:1 failed") == 2
    link.close()
    assert link.notes.endswith("the link ended: it was closed here")


def test_no_path_left(region: Region, fake: FakeVerbs) -> None:
    link = connect(region, fake)
    fake.port("fake0", up=False)
    fake.port("fake1", up=False)
    data = np.zeros(1 << 20, np.uint8)
    parts = [(0, data.ctypes.data, data.nbytes)]
    started = time.monotonic()
    statuses = [link.post(Message(0, parts), make_flag(1, i)) for i in range(1, 4)]
    assert statuses[-1] == Status.PEER_GONE and time.monotonic() - started < 2
    assert link.wait_sent(0, TIMEOUT_US) == Status.PEER_GONE
    assert region.wait_all([0], [make_flag(9, 9)], TIMEOUT_US) == [Status.PEER_GONE]


def test_both_sides_notice_the_end_of_a_link(region: Region, fake: FakeVerbs) -> None:
    link = connect(region, fake, slots=(0, 2))
    newer = connect(region, fake, slots=(1, 2))
    assert ends_with(link, Status.CLOSED)
    Sender(region, newer).exchange(64, slot=1)
    newer.close()
    assert newer.post(Message(1, []), 1) == Status.CLOSED
    assert region.wait_all([1], [99], TIMEOUT_US) == [Status.PEER_GONE]
    last = connect(region, fake)
    region.close()
    assert ends_with(last, Status.PEER_GONE)


def test_a_message_posted_just_before_close_arrives(region: Region, fake: FakeVerbs) -> None:
    fake.delay_us(5000)
    link = connect(region, fake)
    assert link.post(Message(2, []), make_flag(4, 1)) == Status.OK
    link.close()
    assert region.wait_all([2], [make_flag(4, 1)], TIMEOUT_US) == [Status.OK]


def test_a_region_with_tcp_and_verbs_wakes_at_once(fake: FakeVerbs) -> None:
    region = Region(1, 4096, name="both", tcp_host="127.0.0.1", verbs=fake.options())
    link = connect(region, fake, slots=(0, 1))
    for seq in range(1, 6):
        timer = threading.Timer(0.12, lambda seq=seq: link.post(Message(0, []), seq))
        timer.start()
        started = time.monotonic()
        assert region.wait_all([0], [seq], TIMEOUT_US) == [Status.OK]
        took = time.monotonic() - started
        timer.join()
        if took < 0.135:  # a missed wake-up would cost up to 50 ms
            break
    else:
        pytest.fail(f"a doorbell was noticed {took - 0.12:.3f} s late, five times in a row")
    region.close()


def test_invalid_handshakes_are_harmless(region: Region, fake: FakeVerbs) -> None:
    """Without the token, and with the token but random queue pairs or fences."""
    host, port, token = region.addresses[1].split(":")[1:4]
    hello = struct.pack("<II16sII", 0x31564641, 1, bytes.fromhex(token), 2, 1)
    connect_magic, fence_magic = struct.pack("<I", 0x33564641), struct.pack("<I", 0x35564641)
    link = connect(region, fake, slots=(0, 1))
    sender = Sender(region, link)
    rng = random.Random(11)
    for _ in range(10):
        strangers = []
        for i in range(40):
            noise = rng.randbytes(rng.choice((1, 32, 700)))
            if i % 4 == 1:
                noise = hello + noise
            elif i % 4 == 2:
                noise = hello + connect_magic + struct.pack("<I", rng.randrange(18)) + noise
            elif i % 4 == 3:
                start = hello + connect_magic + struct.pack("<I", 1) + bytes(640)
                noise = start + fence_magic + noise
            strangers.append(socket.create_connection((host, int(port)), timeout=3))
            with suppress(ConnectionError):
                strangers[-1].sendall(noise)
        # All must be handled before the last connection below claims slot 2.
        for stranger in strangers:
            with stranger, suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    sender.exchange(1 << 20)
    assert not region.buffer(2).any()
    Sender(region, connect(region, fake, slots=(2, 1))).exchange(64, slot=2)


@pytest.mark.parametrize(
    "at,word",
    [
        pytest.param(4, 3, id="slot that is not the immediate's"),
        pytest.param(8, 0, id="flag 0"),
        pytest.param(44, 1 << 31, id="negative size"),
        pytest.param(44, 1, id="size beyond the slot"),
        pytest.param(72, 1 << 20, id="turn far ahead"),
        pytest.param(80, 0, id="no stripes"),
        pytest.param(80, 17, id="too many stripes"),
    ],
)
def test_a_wrong_record_ends_the_link(region: Region, fake: FakeVerbs, at: int, word: int) -> None:
    link = connect(region, fake, slots=(0, 1))
    fake.damage_record(at, word)
    assert link.post(Message(0, []), 1) == Status.OK
    assert region.wait_all([0], [1], TIMEOUT_US) == [Status.PEER_GONE]
    assert ends_with(link, Status.PEER_GONE)
    assert not region.ready(0, 1) and not region.ready(3, 1)
    Sender(region, connect(region, fake)).exchange(1 << 20)


def test_a_torn_record_never_rings(region: Region, fake: FakeVerbs) -> None:
    link = connect(region, fake)
    fake.damage_record(84, 77)
    assert link.post(Message(0, []), 1) == Status.OK
    assert region.wait_all([0], [1], 50_000) == [Status.DEADLINE]
    assert link.post(Message(0, []), 2) == Status.OK
    assert region.wait_all([0], [2], TIMEOUT_US) == [Status.OK]


def test_slots_taken_by_shm_end_the_verbs_writer(region: Region, fake: FakeVerbs) -> None:
    link = connect(region, fake, slots=(0, 1))
    other = Link(region.addresses, backend="shm", slots=(0, 1), timeout_us=TIMEOUT_US)
    assert ends_with(link, Status.CLOSED)
    assert other.post(Message(0, []), make_flag(2, 1)) == Status.OK
    assert region.ready(0, make_flag(2, 1))
