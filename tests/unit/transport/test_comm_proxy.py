"""Streams that send over tcp and verbs: ``Link.enqueue`` on device cpu, where a stream is the
calling thread. test_comm_gpu_fake.py repeats it on fake GPU drivers, with graphs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from comm_peer import TIMEOUT_US, peer
from fake_verbs import FakeVerbs, built_fake

from afd_comm import MAX_PARTS, USER_BYTES, Link, Message, Region, Status, make_flag

SLOTS = 3
ROWS, ROW_BYTES = 64, (4096, 16, 3)  # parts of a message: arrays of rows
SLOT_BYTES = ROWS * sum(ROW_BYTES) + 4096

Connect = Callable[[Region], Link]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeVerbs]:
    with built_fake(tmp_path_factory.mktemp("verbs")) as fake:
        yield fake


@pytest.fixture
def fake(compiled: FakeVerbs) -> Iterator[FakeVerbs]:
    yield compiled
    compiled.heal()


@pytest.fixture(params=["tcp", "verbs", "ipc"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def owner(fake: FakeVerbs, slots: int = SLOTS) -> Region:
    region = Region(
        slots, SLOT_BYTES, name="rows", tcp_host="127.0.0.1", verbs=fake.options(stripe_bytes=4096)
    )
    region.pin("cpu")
    return region


def connect(region: Region, backend: str, fake: FakeVerbs, timeout_us: int = TIMEOUT_US) -> Link:
    return Link(
        region.addresses,
        backend=backend,
        slots=(0, region.slots),
        timeout_us=timeout_us,
        verbs=fake.options(stripe_bytes=4096),
    )


def parts_of(arrays: list[np.ndarray]) -> list[tuple[int, int, int]]:
    starts = np.cumsum([0, *(a.nbytes for a in arrays)])
    return [(int(at), a.ctypes.data, a.nbytes) for at, a in zip(starts, arrays, strict=False)]


def arrival(region: Region, slot: int, flag: int) -> Status:
    return region.wait_all([slot], [flag], TIMEOUT_US)[0]


def await_status(link: Link) -> Status:
    """The link's first status that is not OK."""
    end = time.monotonic() + 10
    while link.status == Status.OK:
        assert time.monotonic() < end, "the link noticed nothing"
        time.sleep(0.001)
    return link.status


def test_enqueue_equals_post(backend: str, fake: FakeVerbs) -> None:
    rng = np.random.default_rng(11)
    posted, enqueued = Region(SLOTS, SLOT_BYTES, name="posted"), owner(fake)
    plain = Link(posted.addresses, backend="shm", slots=(0, SLOTS), timeout_us=TIMEOUT_US)
    link = connect(enqueued, backend, fake)
    assert link.backend == backend
    for seq in range(1, 200):
        slot, flag = int(rng.integers(SLOTS)), make_flag(1, seq)
        cuts = np.sort(rng.integers(0, SLOT_BYTES + 1, 2 * int(rng.integers(MAX_PARTS + 1))))
        pieces = [
            (int(start), rng.integers(0, 256, int(end - start), dtype=np.uint8))
            for start, end in zip(cuts[::2], cuts[1::2], strict=True)
        ]
        parts = [(offset, data.ctypes.data, data.nbytes) for offset, data in pieces]
        message = Message(slot, parts, rng.bytes(USER_BYTES), int(rng.integers(2**32)))
        assert plain.post(message, flag) == link.enqueue(0, message, flag) == Status.OK
        enqueued.enqueue_wait(0, [slot], [flag], reset=bool(rng.integers(2)))
        assert np.array_equal(posted.buffer(slot), enqueued.buffer(slot))
        ours, theirs = posted.header(slot), enqueued.header(slot)
        assert (ours.user, ours.count, ours.nbytes) == (theirs.user, theirs.count, theirs.nbytes)
    assert link.status == Status.OK


def test_only_the_counted_rows_are_sent(backend: str, fake: FakeVerbs) -> None:
    rng = np.random.default_rng(12)
    region = owner(fake)
    link = connect(region, backend, fake)
    word = np.zeros(1, np.uint32)
    capacity = [ROWS * n for n in ROW_BYTES]
    for seq in range(1, 100):
        slot, flag = int(rng.integers(SLOTS)), make_flag(1, seq)
        rows = [0, ROWS, int(rng.integers(ROWS + 1))][seq % 3]
        region.buffer(slot)[:] = 255
        arrays = [rng.integers(0, 255, n, dtype=np.uint8) for n in capacity]
        word[0] = rows
        message = Message(slot, parts_of(arrays), b"rows", ROWS)
        assert link.enqueue(0, message, flag, word.ctypes.data) == Status.OK
        assert arrival(region, slot, flag) == Status.OK
        header, got = region.header(slot), region.buffer(slot)
        # ipc cannot read the word without a kernel, and sends everything.
        sent = ROWS if backend == "ipc" else rows
        assert (header.count, header.nbytes) == (sent, sent * sum(ROW_BYTES))
        assert header.user.startswith(b"rows")
        for (offset, _, nbytes), data, row in zip(message.parts, arrays, ROW_BYTES, strict=True):
            assert np.array_equal(got[offset : offset + sent * row], data[: sent * row])
            assert (got[offset + sent * row : offset + nbytes] == 255).all()


def test_counts_that_do_not_fit(fake: FakeVerbs) -> None:
    region = owner(fake)
    link = connect(region, "tcp", fake)
    word, data = np.array([5], np.uint32), np.zeros(4096, np.uint8)
    at = word.ctypes.data
    part = (0, data.ctypes.data, data.nbytes)
    assert link.enqueue(0, Message(0, [part], count=3), 1, at) == Status.BAD_HEADER
    assert link.enqueue(0, Message(0, [part]), 1, at) == Status.BAD_HEADER
    with pytest.raises(ValueError, match="aligned 32-bit word"):
        link.enqueue(0, Message(0, [part], count=4), 1, at + 1)
    # More rows than the message has: only the thread that sends can notice.
    assert link.enqueue(0, Message(0, [part], count=4), 1, at) == Status.OK
    assert await_status(link) == Status.BAD_HEADER
    assert link.enqueue(0, Message(0, [part], count=8), 2, at) == Status.BAD_HEADER
    assert not region.ready(0, 1)


def test_many_links_and_slots_at_once(backend: str, fake: FakeVerbs) -> None:
    """Posts by the host and enqueued messages share their links."""
    rng = np.random.default_rng(13)
    regions = [owner(fake) for _ in range(3)]
    links = [connect(region, backend, fake) for region in regions]
    data = rng.integers(0, 256, SLOT_BYTES, dtype=np.uint8)
    for seq in range(1, 60):
        flag = make_flag(1, seq)
        sizes = rng.integers(1, SLOT_BYTES, (len(links), SLOTS))
        for i, link in enumerate(links):
            for slot in range(SLOTS):
                part = (0, data.ctypes.data, int(sizes[i, slot]))
                message = Message(slot, [part])
                if slot == 0:
                    assert link.post(message, flag) == Status.OK
                else:
                    assert link.enqueue(0, message, flag) == Status.OK
        for i, region in enumerate(regions):
            assert region.wait_all([*range(SLOTS)], [flag] * SLOTS, TIMEOUT_US) == [0] * SLOTS
            for slot in range(SLOTS):
                n = sizes[i, slot]
                assert np.array_equal(region.buffer(slot)[:n], data[:n])


def test_bad_messages_and_closed_ends(backend: str, fake: FakeVerbs) -> None:
    region = owner(fake, 2)
    link = connect(region, backend, fake)
    data = np.zeros(SLOT_BYTES + 1, np.uint8)

    def enqueue(slot: int, flag: int, nbytes: int) -> Status:
        return link.enqueue(0, Message(slot, [(0, data.ctypes.data, nbytes)]), flag)

    assert enqueue(0, 1, data.nbytes) == Status.CAPACITY
    assert enqueue(2, 1, 1) == Status.BAD_HEADER
    assert enqueue(0, 0, 1) == Status.BAD_HEADER
    assert enqueue(0, 1, 1) == Status.OK
    assert arrival(region, 0, 1) == Status.OK
    newer = connect(region, backend, fake)
    if backend != "ipc":  # which looks at its claim in each call, and has no status
        assert await_status(link) == Status.CLOSED
    assert enqueue(0, 2, 1) == Status.CLOSED
    link.close()
    assert enqueue(0, 2, 1) == Status.CLOSED
    link = newer
    assert enqueue(0, 3, 1) == Status.OK
    assert arrival(region, 0, 3) == Status.OK
    region.close()
    if backend != "ipc":
        assert await_status(link) == Status.PEER_GONE
    assert enqueue(0, 4, 1) == Status.PEER_GONE


@pytest.mark.parametrize("backend", ["tcp", "verbs"])
def test_close_sends_what_was_enqueued(backend: str, fake: FakeVerbs) -> None:
    region = owner(fake)
    data = np.arange(SLOT_BYTES, dtype=np.uint8)
    for flag in range(1, 30):
        link = connect(region, backend, fake)
        assert link.enqueue(0, Message(1, [(0, data.ctypes.data, data.nbytes)]), flag) == 0
        link.close()
        assert arrival(region, 1, flag) == Status.OK


def test_a_dead_receiver_is_noticed_by_the_next_enqueue() -> None:
    with peer("own", slots=1, slot_bytes=SLOT_BYTES, tcp=True) as receiver:
        link = Link(receiver.read(), backend="tcp", slots=(0, 1), timeout_us=TIMEOUT_US)
        data = np.zeros(64, np.uint8)
        message = Message(0, [(0, data.ctypes.data, 64)])
        assert link.enqueue(0, message, 1) == Status.OK
        receiver.kill()
        assert await_status(link) == Status.PEER_GONE
        assert link.enqueue(0, message, 2) == Status.PEER_GONE


def test_verbs_between_two_processes(fake: FakeVerbs) -> None:
    rng = np.random.default_rng(15)
    arguments = {"slots": 2, "slot_bytes": SLOT_BYTES, "tcp": False, "verbs": fake.library}
    with peer("show", **arguments) as receiver:
        link = Link(
            receiver.read(),
            backend="verbs",
            slots=(0, 2),
            timeout_us=TIMEOUT_US,
            verbs=fake.options(stripe_bytes=4096),
        )
        for flag in range(1, 20):
            data = rng.integers(0, 256, int(rng.integers(1, SLOT_BYTES)), dtype=np.uint8)
            message = Message(flag % 2, [(0, data.ctypes.data, data.nbytes)])
            assert link.enqueue(0, message, flag) == Status.OK
            if flag == 10:
                fake.lose_acks("fake0")
            receiver.write([flag % 2, flag, data.nbytes])
            assert receiver.read() == hashlib.sha256(data).hexdigest()
        receiver.kill()
        assert await_status(link) == Status.PEER_GONE


def test_a_stopped_receiver_is_a_deadline(fake: FakeVerbs) -> None:
    """verbs: the acknowledgement of the slot's last message is late."""
    region = owner(fake)
    link = connect(region, "verbs", fake, timeout_us=100_000)
    data = np.zeros(SLOT_BYTES, np.uint8)
    message = Message(0, [(0, data.ctypes.data, data.nbytes)])
    fake.delay_us(300_000)
    assert link.enqueue(0, message, 1) == Status.OK
    time.sleep(0.02)  # the thread that sends has taken the ticket
    assert link.enqueue(0, message, 2) == Status.OK
    assert await_status(link) == Status.DEADLINE
    assert link.enqueue(0, message, 3) == Status.DEADLINE
    fake.heal()


def test_ports_fail_under_enqueue(fake: FakeVerbs) -> None:
    rng = np.random.default_rng(14)
    region = owner(fake)
    link = connect(region, "verbs", fake)
    data = rng.integers(0, 256, SLOT_BYTES, dtype=np.uint8)
    link.register_memory(data.ctypes.data, data.nbytes)
    for seq in range(1, 40):
        if seq == 10:
            fake.lose_acks("fake0")
        if seq == 20:
            fake.heal()
        slot, flag = seq % SLOTS, make_flag(1, seq)
        n = int(rng.integers(1, SLOT_BYTES))
        region.buffer(slot)[:] = 0
        assert link.enqueue(0, Message(slot, [(0, data.ctypes.data, n)]), flag) == Status.OK
        region.enqueue_wait(0, [slot], [flag])
        assert np.array_equal(region.buffer(slot)[:n], data[:n])
    fake.port("fake0", up=False)
    fake.port("fake1", up=False)
    assert link.enqueue(0, Message(0, [(0, data.ctypes.data, 9)]), 99) == Status.OK
    assert await_status(link) == Status.PEER_GONE


def test_a_guard_acts_when_nothing_rings(fake: FakeVerbs) -> None:
    """The sender's link ends under a message: the receiver's stream is released by its guard."""
    region = owner(fake)
    link = connect(region, "verbs", fake)
    guard = region.guard(0, [0], [7])  # on device cpu a stream is never late
    assert guard.wait(1000) == [Status.OK]
    fake.port("fake0", up=False)
    fake.port("fake1", up=False)
    assert link.enqueue(0, Message(0, []), 7) == Status.OK
    assert arrival(region, 0, 7) == Status.PEER_GONE


def test_recordings_can_be_released_in_any_order(backend: str, fake: FakeVerbs) -> None:
    region = owner(fake)
    link = connect(region, backend, fake)
    first, second = link.record(), link.record()
    second.release()
    assert link.enqueue(0, Message(0, []), 5) == Status.OK
    first.release()
    first.release()
    link.close()
    del link
    del second
