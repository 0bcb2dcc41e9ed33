"""afd_comm: behaviour that all backends share, over shared memory and over TCP."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from comm_peer import TIMEOUT_US, peer, post

from afd_comm import (
    MAX_PARTS,
    USER_BYTES,
    CommError,
    Link,
    Message,
    PeerTrace,
    Region,
    Status,
    backends,
    make_flag,
    post_each,
)

SLOT_BYTES = 4096
FLAG = make_flag(1, 1)
DATA = np.arange(64, dtype=np.uint8)


@pytest.fixture(params=["shm", "tcp"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def region() -> Region:
    return Region(4, SLOT_BYTES, name="test", tcp_host="127.0.0.1")


def connect(region: Region, backend: str, slots: tuple[int, int] | None = None) -> Link:
    return Link(region.addresses, backend=backend, slots=slots, timeout_us=TIMEOUT_US)


def arrival(region: Region, slot: int = 0, flag: int = FLAG) -> Status:
    return region.wait_all([slot], [flag], TIMEOUT_US)[0]


def random_parts(rng: np.random.Generator, slot_bytes: int) -> list[tuple[int, np.ndarray]]:
    """Returns disjoint parts of random size (also empty) at random offsets of a slot."""
    cuts = np.sort(rng.integers(0, slot_bytes + 1, 2 * int(rng.integers(0, MAX_PARTS + 1))))
    return [
        (int(start), rng.integers(0, 256, int(end - start), dtype=np.uint8))
        for start, end in zip(cuts[::2], cuts[1::2], strict=True)
    ]


def test_random_messages_equal_a_plain_copy(backend: str) -> None:
    rng = np.random.default_rng(7)
    slots, slot_bytes = 3, 300_001
    region = Region(slots, slot_bytes, name="random", tcp_host="127.0.0.1")
    link = connect(region, backend)
    assert link.backend == backend
    expected = np.zeros((slots, slot_bytes), np.uint8)
    for seq in range(1, 81):
        slot = int(rng.integers(slots))
        parts = random_parts(rng, slot_bytes if seq % 2 else 2000)
        for offset, data in parts:
            expected[slot, offset : offset + data.size] = data
        flag = make_flag(3, seq)
        raw = [(offset, data.ctypes.data, data.nbytes) for offset, data in parts]
        assert link.post(Message(slot, raw), flag) == Status.OK
        assert arrival(region, slot, flag) == Status.OK
        assert region.header(slot).nbytes == sum(data.nbytes for _, data in parts)
        for i in range(slots):
            assert np.array_equal(region.buffer(i), expected[i])


def test_header_fields_arrive(region: Region, backend: str) -> None:
    link = connect(region, backend)
    before = time.monotonic_ns()
    part = (0, DATA.ctypes.data, DATA.nbytes)
    link.trace = True
    region.trace((0, 4), PeerTrace())
    user = bytes(range(1, USER_BYTES + 1))
    assert link.post(Message(2, [part], user, 2**32 - 7), FLAG) == Status.OK
    assert arrival(region, 2) == Status.OK
    h = region.header(2)
    assert (h.user, h.count, h.nbytes) == (user, 2**32 - 7, 64)
    assert before <= h.t_posted <= h.t_sent <= h.t_arrived <= h.t_consumed <= time.monotonic_ns()
    with pytest.raises(AttributeError):
        h.count = 1  # type: ignore[misc]


def test_a_message_is_a_value() -> None:
    part = (8, DATA.ctypes.data, DATA.nbytes)
    message = Message(1, [part, (0, 0, 0)], b"abc", 5)
    assert (message.slot, message.count, message.nbytes) == (1, 5, 64)
    assert message.parts == [part, (0, 0, 0)]
    assert message.user == b"abc" + bytes(USER_BYTES - 3)
    assert repr(message) == f"Message(slot=1, user=616263{'00' * 21}, count=5, nbytes=64, parts=2)"
    with pytest.raises(AttributeError):
        message.slot = 2  # type: ignore[misc]
    with pytest.raises(ValueError, match=f"user has {USER_BYTES + 1} bytes; a header holds"):
        Message(1, [], bytes(USER_BYTES + 1))
    with pytest.raises(TypeError):
        Message(1, [], count=2**32)


def test_one_message_is_posted_many_times(region: Region, backend: str) -> None:
    link = connect(region, backend)
    message = Message(1, [(0, DATA.ctypes.data, DATA.nbytes)], b"again")
    for seq in range(1, 20):
        flag = make_flag(1, seq)
        assert link.post(message, flag) == Status.OK
        assert arrival(region, 1, flag) == Status.OK
        assert region.header(1).user == message.user


def test_backends_are_named_in_order_of_preference() -> None:
    assert backends() == ("ipc", "shm", "verbs", "tcp")


def test_ping_pong_between_processes(backend: str) -> None:
    count = 200
    rng = np.random.default_rng(1)
    region = Region(1, SLOT_BYTES, name="ping", tcp_host="127.0.0.1")
    with peer(
        "echo", slots=1, slot_bytes=SLOT_BYTES, tcp=True, backend=backend, count=count
    ) as other:
        link = Link(other.read(), backend=backend, slots=(0, 1), timeout_us=TIMEOUT_US)
        other.write(region.addresses)
        for seq in range(1, count + 1):
            data = rng.integers(0, 256, int(rng.integers(1, SLOT_BYTES)), dtype=np.uint8)
            flag = make_flag(1, seq)
            assert post(link, 0, flag, data) == Status.OK
            assert arrival(region, 0, flag) == Status.OK
            assert np.array_equal(region.buffer(0)[: data.size], data + np.uint8(1))


def test_wait_all_and_wait_any(region: Region, backend: str) -> None:
    link = connect(region, backend)
    assert region.wait_any([0, 1, 2], [FLAG] * 3, 1000) == -1
    post(link, 1, FLAG, DATA)
    assert region.wait_any([0, 1, 2], [FLAG] * 3, TIMEOUT_US) == 1
    assert region.wait_all([0, 1], [FLAG] * 2, 1000) == [Status.DEADLINE, Status.OK]
    threading.Timer(0.05, lambda: post(link, 0, FLAG, DATA)).start()
    assert region.wait_all([0, 1], [FLAG] * 2, TIMEOUT_US) == [Status.OK, Status.OK]
    assert region.wait_all([], [], 1000) == []
    assert region.ready(0, FLAG) and not region.ready(2, FLAG)


def test_many_slots_in_one_wait(backend: str) -> None:
    count = 100
    region = Region(count, 64, name="many", tcp_host="127.0.0.1")
    link = connect(region, backend)
    flags = [make_flag(1, i + 1) for i in range(count)]
    for slot in range(count):
        post(link, slot, flags[slot], DATA)
    assert set(region.wait_all(list(range(count)), flags, TIMEOUT_US)) == {Status.OK}


@pytest.mark.parametrize("timeout_ms", [0, 30, 130])
def test_deadline_is_kept(region: Region, timeout_ms: int) -> None:
    start = time.monotonic()
    assert region.wait_all([0], [FLAG], timeout_ms * 1000) == [Status.DEADLINE]
    assert region.wait_any([0], [FLAG], timeout_ms * 1000) == -1
    elapsed_ms = (time.monotonic() - start) * 1000
    assert 2 * timeout_ms <= elapsed_ms < 2 * timeout_ms + 1000


@pytest.mark.parametrize("spin_us", [None, 0])
def test_a_long_wait_sleeps(region: Region, spin_us: int | None) -> None:
    """A wait spins only at first, then it sleeps."""
    if spin_us is not None:
        region.set_spin_us(spin_us)
    before = time.thread_time()
    assert region.wait_all([0], [FLAG], 300_000) == [Status.DEADLINE]
    assert time.thread_time() - before < 0.05


def test_stale_generation_is_ignored(region: Region, backend: str) -> None:
    link = connect(region, backend)
    post(link, 0, make_flag(1, 5), DATA)
    assert arrival(region, 0, make_flag(1, 5)) == Status.OK
    assert region.wait_all([0], [make_flag(2, 5)], 20_000) == [Status.DEADLINE]
    post(link, 0, make_flag(2, 5), DATA)
    assert arrival(region, 0, make_flag(2, 5)) == Status.OK


def test_bounds_are_checked(region: Region, backend: str) -> None:
    link = connect(region, backend, slots=(1, 2))
    assert post(link, 1, FLAG, np.zeros(SLOT_BYTES, np.uint8)) == Status.OK
    assert post(link, 1, FLAG, np.zeros(SLOT_BYTES + 1, np.uint8)) == Status.CAPACITY
    assert post(link, 1, FLAG, DATA, offset=SLOT_BYTES - 63) == Status.CAPACITY
    assert post(link, 1, FLAG, DATA, offset=2**64 - 1) == Status.CAPACITY
    assert post(link, 4, FLAG, DATA) == Status.BAD_HEADER
    assert post(link, 0, FLAG, DATA) == Status.BAD_HEADER  # not claimed by this link
    assert post(link, 1, 0, DATA) == Status.BAD_HEADER
    with pytest.raises(ValueError, match="at most"):
        Message(1, [(0, DATA.ctypes.data, 1)] * (MAX_PARTS + 1))
    with pytest.raises(CommError, match="same topology"):
        connect(region, backend, slots=(3, 2))
    with pytest.raises(CommError, match="same topology"):
        connect(region, backend, slots=(2**32 - 1, 2**32 - 1))


def test_wrong_arguments_raise(region: Region) -> None:
    with pytest.raises(IndexError, match="has 4 slots"):
        region.buffer(4)
    with pytest.raises(IndexError):
        region.wait_all([-1], [FLAG], 0)
    with pytest.raises(ValueError, match="same length"):
        region.wait_all([0], [], 0)
    with pytest.raises(ValueError, match="flag 0"):
        region.wait_any([0], [0], 0)
    with pytest.raises(CommError, match="unknown backend"):
        Link(region.addresses, backend="pigeon", timeout_us=1000)
    with pytest.raises(CommError, match="not a region address"):
        Link(["shm:1:2"], timeout_us=1000)
    with pytest.raises(CommError, match="at least one"):
        Region(0, 1, name="none")
    with pytest.raises(CommError, match="too large"):
        Region(2**24, 2**46, name="huge")
    with pytest.raises(TypeError):
        make_flag(1, 2**32)
    assert make_flag(2, 3) == (2 << 32) | 3


def test_killed_sender_is_gone(region: Region, backend: str) -> None:
    with peer(
        "send", addresses=region.addresses, backend=backend, slots=(0, 2), flag=FLAG, value=9
    ) as sender:
        assert sender.read() == "posted"
        assert not region.gone(0)
        start = time.monotonic()
        threading.Timer(0.1, sender.kill).start()
        flags = [FLAG, make_flag(1, 2)]
        # The message that it sent before its death still arrives.
        assert region.wait_all([0, 1], flags, TIMEOUT_US) == [Status.OK, Status.PEER_GONE]
        assert time.monotonic() - start < 1.0
        start = time.monotonic()
        assert region.wait_any([0, 1], [make_flag(1, 2)] * 2, TIMEOUT_US) == -1
        assert time.monotonic() - start < 0.5
    # Nobody claimed slot 2, so its message is late, not gone.
    assert region.wait_all([1, 2], [make_flag(1, 2)] * 2, 150_000) == [
        Status.PEER_GONE,
        Status.DEADLINE,
    ]
    assert region.gone(0) and region.gone(1) and not region.gone(2)


def test_restarted_sender_takes_the_slots_over(region: Region, backend: str) -> None:
    old = connect(region, backend, slots=(0, 2))
    assert post(old, 0, FLAG, DATA) == Status.OK
    assert arrival(region) == Status.OK
    second = make_flag(2, 1)
    with peer(
        "send", addresses=region.addresses, backend=backend, slots=(0, 2), flag=second, value=5
    ) as sender:
        assert sender.read() == "posted"
        assert region.wait_all([0, 1], [second] * 2, TIMEOUT_US) == [Status.OK] * 2
        assert post(old, 0, make_flag(1, 2), DATA) == Status.CLOSED
        assert region.ready(0, second) and region.buffer(0)[0] == 5
        old.close()
        assert not region.gone(0)  # the old link must not end the new link's claim
    third = make_flag(3, 1)
    assert region.wait_all([0], [third], TIMEOUT_US) == [Status.PEER_GONE]
    new = connect(region, backend, slots=(0, 2))
    assert post(new, 0, third, DATA) == Status.OK
    assert arrival(region, 0, third) == Status.OK
    assert not region.gone(0)


def test_a_claim_over_one_backend_replaces_one_over_the_other(region: Region, backend: str) -> None:
    old = connect(region, {"shm": "tcp", "tcp": "shm"}[backend], slots=(0, 1))
    new = connect(region, backend, slots=(0, 1))
    assert post(new, 0, make_flag(2, 1), DATA) == Status.OK
    assert arrival(region, 0, make_flag(2, 1)) == Status.OK
    post(old, 0, FLAG, DATA)
    assert region.wait_all([0], [FLAG], 50_000) == [Status.DEADLINE]
    assert region.ready(0, make_flag(2, 1))


def test_a_closed_link_releases_its_claim(region: Region, backend: str) -> None:
    link = connect(region, backend, slots=(0, 1))
    threading.Timer(0.05, link.close).start()
    assert region.wait_all([0], [FLAG], TIMEOUT_US) == [Status.PEER_GONE]
    assert post(link, 0, FLAG, DATA) == Status.CLOSED
    link.close()


def test_dead_region_owner(backend: str) -> None:
    with peer("own", slots=1, slot_bytes=SLOT_BYTES, tcp=True) as owner:
        addresses = owner.read()
        link = Link(addresses, backend=backend, slots=(0, 1), timeout_us=TIMEOUT_US)
        assert post(link, 0, FLAG, DATA) == Status.OK
        owner.kill()
        deadline = time.monotonic() + 1.0
        status = Status.OK
        while status == Status.OK and time.monotonic() < deadline:
            status = post(link, 0, FLAG, np.zeros(SLOT_BYTES, np.uint8))
        assert status == Status.PEER_GONE
        assert post(link, 0, FLAG, DATA) == Status.PEER_GONE
        with pytest.raises(CommError, match="process"):
            Link(addresses, backend=backend, timeout_us=300_000)


def test_close_and_wake(backend: str) -> None:
    region = Region(2, SLOT_BYTES, name="closing", tcp_host="127.0.0.1")
    link = connect(region, backend, slots=(0, 1))
    start = time.monotonic()
    threading.Timer(0.05, region.wake).start()
    assert region.wait_all([0], [FLAG], TIMEOUT_US) == [Status.DEADLINE]
    threading.Timer(0.05, region.wake).start()
    assert region.wait_any([0], [FLAG], TIMEOUT_US) == -1
    view = region.buffer(0)
    threading.Timer(0.05, region.close).start()
    assert region.wait_all([0], [FLAG], TIMEOUT_US)[0] in (Status.CLOSED, Status.PEER_GONE)
    assert time.monotonic() - start < 2.0
    region.close()
    assert region.closed
    assert region.wait_all([1], [FLAG], TIMEOUT_US) == [Status.CLOSED]
    assert post(link, 0, FLAG, DATA) == Status.PEER_GONE
    del region
    view[:] = 1  # a view keeps the memory alive after close()
    assert int(view.sum()) == SLOT_BYTES


def test_signal_handler_interrupts_a_wait(region: Region) -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(Stop):
            region.wait_all([0], [FLAG], TIMEOUT_US)
        assert time.monotonic() - start < 1.0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_concurrent_waiters_and_senders(region: Region, backend: str) -> None:
    """Four slots, each with its own sender and waiter thread; every payload is checked."""
    rounds = 50
    failures: list[str] = []

    def send(slot: int, acks: list[threading.Semaphore]) -> None:
        link = connect(region, backend, slots=(slot, 1))
        for seq in range(1, rounds + 1):
            acks[slot].acquire()
            post(link, slot, make_flag(1, seq), np.full(512, (seq + slot) % 251, np.uint8))

    def receive(slot: int, acks: list[threading.Semaphore]) -> None:
        for seq in range(1, rounds + 1):
            acks[slot].release()
            status = arrival(region, slot, make_flag(1, seq))
            if status != Status.OK or not (region.buffer(slot)[:512] == (seq + slot) % 251).all():
                failures.append(f"slot {slot} seq {seq}: {status!r}")
                return

    acks = [threading.Semaphore(0) for _ in range(4)]
    threads = [
        threading.Thread(target=f, args=(slot, acks)) for slot in range(4) for f in (send, receive)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=8)
    assert not failures and not any(t.is_alive() for t in threads)


def test_post_each_does_what_single_posts_do(backend: str) -> None:
    rng, size = np.random.default_rng(4), 5
    regions = [Region(4, SLOT_BYTES, name=f"to-{i}", tcp_host="127.0.0.1") for i in range(size)]
    links = [Link(r.addresses, backend=backend, timeout_us=TIMEOUT_US) for r in regions]
    for number in range(1, 21):
        data = rng.integers(0, 256, int(rng.integers(1, SLOT_BYTES + 1)), dtype=np.uint8)
        said = Message(0, [(0, data.ctypes.data, len(data))], b"u", number)
        slots = rng.integers(0, 4, size, dtype=np.uint32)
        flags = np.array([make_flag(i + 1, number) for i in range(size)], np.uint64)
        assert post_each(links, said, slots, flags) == []
        for region, slot, flag in zip(regions, slots.tolist(), flags.tolist(), strict=True):
            assert region.wait_all([slot], [flag], TIMEOUT_US) == [Status.OK]
            header = region.header(slot)
            assert (header.count, header.user[:1]) == (number, b"u")
            assert np.array_equal(region.buffer(slot)[: header.nbytes], data)


def test_post_each_names_the_links_that_failed() -> None:
    regions = [Region(1, 64, name=f"to-{i}") for i in range(3)]
    links = [Link(r.addresses, timeout_us=TIMEOUT_US) for r in regions]
    links[1].close()
    slots, flags = np.zeros(3, np.uint32), np.full(3, FLAG, np.uint64)
    assert post_each(links, Message(0, []), slots, flags) == [(1, Status.CLOSED)]
    assert [region.ready(0, FLAG) for region in regions] == [True, False, True]
    with pytest.raises(ValueError, match="one entry per link"):
        post_each(links, Message(0, []), slots[:2], flags)
