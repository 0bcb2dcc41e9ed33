"""Cases of test_comm_gpu_fake.py: GPU streams that send over tcp and verbs, see gpu_cases.py.

FAKE_IBVERBS names the libibverbs without hardware.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import sys
import time

import numpy as np
from comm_peer import peer
from gpu_cases import TIMEOUT_US, Gpu, memory_of

from afd_comm import Link, Message, Region, Status, VerbsOptions, make_flag

SLOTS, ROWS = 3, 32
ROW_BYTES = (30_000, 16)
CAPACITY = [ROWS * n for n in ROW_BYTES]
SLOT_BYTES = sum(CAPACITY)  # several chunks of a staged copy
LIBRARY = os.environ["FAKE_IBVERBS"]
FAKE = ctypes.CDLL(LIBRARY)


def verbs() -> VerbsOptions:
    return VerbsOptions(ports=["fake0", "fake1"], host="127.0.0.1", library=LIBRARY)


class Way:
    """One direction: a region, and a sender with its own memory and stream.

    device "cpu" on either side makes a mixed pair.
    """

    def __init__(
        self, gpu: Gpu, backend: str, sender: str, receiver: str, connections: int = 0
    ) -> None:
        """connections: of backend tcp."""
        self.gpu, self._connections = gpu, connections
        self.region = Region(
            SLOTS,
            SLOT_BYTES,
            name="to",
            device=receiver,
            tcp_host="127.0.0.1",
            verbs=verbs() if backend == "verbs" else None,
        )
        if receiver == "cpu":
            self.region.pin(gpu.device)
        self._backend, self._sender = backend, sender
        self.link = self.new_link()
        self.source = Region(SLOTS, SLOT_BYTES, name="from", device=sender)
        self.sends = gpu.stream() if sender != "cpu" else 0
        self.waits = gpu.stream()
        self.word = np.zeros(SLOTS, np.uint32)

    def new_link(self) -> Link:
        return Link(
            self.region.addresses,
            backend=self._backend,
            slots=(0, SLOTS),
            timeout_us=TIMEOUT_US,
            device=self._sender,
            tcp_connections=self._connections,
            verbs=verbs() if self._backend == "verbs" else None,
        )

    def rows(self, region: Region, slot: int) -> np.ndarray:
        if region.device == "cpu":
            return region.buffer(slot)
        return memory_of(region, slot)[0, :SLOT_BYTES]

    def message(self, slot: int, rows: int = ROWS) -> Message:
        at = self.rows(self.source, slot).ctypes.data
        parts = [(0, at, CAPACITY[0] // ROWS * rows)]
        parts.append((CAPACITY[0], at + CAPACITY[0], CAPACITY[1] // ROWS * rows))
        return Message(slot, parts, b"w", rows)

    def fill(self, rng: np.random.Generator, slot: int) -> np.ndarray:
        sent = self.rows(self.source, slot)
        sent[:] = rng.integers(0, 256, SLOT_BYTES, dtype=np.uint8)
        self.rows(self.region, slot)[:] = 0
        return sent

    def check(self, slot: int, sent: np.ndarray, rows: int) -> None:
        got, header = self.rows(self.region, slot), self.region.header(slot)
        assert (header.count, header.nbytes) == (rows, rows * sum(ROW_BYTES))
        for start, capacity, row in zip((0, CAPACITY[0]), CAPACITY, ROW_BYTES, strict=True):
            middle, end = start + rows * row, start + capacity
            assert np.array_equal(got[start:middle], sent[start:middle])
            assert not got[middle:end].any()


def exchange(way: Way, rounds: int = 12) -> None:
    """Eager messages with and without a count, and posts by the host, in random order."""
    rng = np.random.default_rng(21)
    for seq in range(1, rounds):
        slot, flag = int(rng.integers(SLOTS)), make_flag(1, seq)
        rows = [ROWS, 0, int(rng.integers(ROWS + 1))][seq % 3]
        sent, kind = way.fill(rng, slot), int(rng.integers(3))
        way.region.enqueue_wait(way.waits, [slot], [flag])
        way.word[slot] = rows
        if kind == 0:
            status = way.link.post(way.message(slot, rows), flag)
        elif kind == 1:
            status = way.link.enqueue(way.sends, way.message(slot, rows), flag)
        else:
            word = way.word[slot : slot + 1].ctypes.data
            status = way.link.enqueue(way.sends, way.message(slot), flag, word)
        assert status == Status.OK
        way.gpu.synchronize(way.waits)
        way.check(slot, sent, rows)
    assert way.link.status == Status.OK


def staged_tcp(gpu: Gpu) -> None:
    ways = ((gpu.peer, gpu.device), (gpu.peer, "cpu"), ("cpu", gpu.device))
    for (sender, receiver), connections in itertools.product(ways, (1, 4)):
        way = Way(gpu, "tcp", sender, receiver, connections)
        assert way.link.backend == "tcp"
        exchange(way)
        wanted = "" if sender == "cpu" else f"tcp copies messages of {sender} through host memory"
        assert way.link.notes == wanted
        way.link.close()
    # Staged copies must not wait behind the streams that wait for them.
    assert any(line.startswith("stream priority") for line in gpu.log)


def auto_backend(gpu: Gpu) -> None:
    """ipc inside a host, as far as it reaches; tcp for a CPU that sends to a GPU."""
    for sender, receiver, backend in (
        (gpu.peer, gpu.device, "ipc"),
        (gpu.peer, "cpu", "ipc"),
        ("cpu", gpu.device, "tcp"),
    ):
        way = Way(gpu, "auto", sender, receiver)
        assert way.link.backend == backend
        sent = way.fill(np.random.default_rng(1), 0)
        assert way.link.post(way.message(0), 1) == Status.OK
        assert way.region.wait_all([0], [1], TIMEOUT_US) == [Status.OK]
        way.check(0, sent, ROWS)


def relinked(gpu: Gpu) -> None:
    """A further link frees no device memory. That waits for an idle device, and a link to a peer
    that came back is made while a stream waits for it."""
    way = Way(gpu, "verbs", gpu.peer, gpu.device)
    frees = gpu.log.count("free")
    assert frees > 0
    way.link.close()
    way.link = way.new_link()
    assert gpu.log.count("free") == frees
    exchange(way)


def line_rate(gpu: Gpu) -> None:
    """The stand-in NIC sends no faster than it is told to."""
    os.environ["AFD_FAKE_NIC_GBPS"] = "1"
    way = Way(gpu, "verbs", gpu.peer, gpu.device)
    way.fill(np.random.default_rng(1), 0)
    began = time.monotonic()
    assert way.link.enqueue(way.sends, way.message(0), 1) == Status.OK
    assert way.region.wait_all([0], [1], TIMEOUT_US) == [Status.OK]
    assert time.monotonic() - began > 0.95 * 8 * SLOT_BYTES / 1e9 / 2  # two NICs


def without_bytes(gpu: Gpu) -> None:
    """The stand-in NIC takes the line's time for a payload and leaves it away, if it is told to."""
    os.environ["AFD_FAKE_NIC_BYTES"] = "0"
    way = Way(gpu, "verbs", "cpu", "cpu")
    way.fill(np.random.default_rng(1), 0)
    assert way.link.post(way.message(0), 1) == Status.OK
    assert way.region.wait_all([0], [1], TIMEOUT_US) == [Status.OK]
    assert way.region.header(0).count == ROWS
    assert not way.rows(way.region, 0)[: CAPACITY[0]].any()  # the small part is copied


def direct_verbs(gpu: Gpu) -> None:
    for sender, receiver in ((gpu.peer, gpu.device), (gpu.peer, "cpu"), ("cpu", gpu.device)):
        way = Way(gpu, "verbs", sender, receiver)
        exchange(way)
        assert way.link.notes == ""  # the NIC reads and writes device memory: nothing is staged
        way.link.close()
    # The fake CUDA device reports no order of RDMA writes, so batches of arrivals are flushed.
    assert ("flush" in gpu.log) == (gpu.kind == "cuda")
    assert (FAKE.fake_dmabufs() > 0) == (gpu.kind == "cuda")


def staged_verbs(gpu: Gpu) -> None:
    """A NIC that cannot register device memory."""
    if gpu.kind == "hip":
        return  # the fake HIP driver has no dma-buf that could be refused
    FAKE.fake_refuse_devices(1)
    for sender, receiver in ((gpu.peer, gpu.device), (gpu.peer, "cpu"), ("cpu", gpu.device)):
        way = Way(gpu, "verbs", sender, receiver)
        assert ("copied through host memory" in way.link.notes) == (sender != "cpu")
        exchange(way)
        way.link.close()


def to_another_process(gpu: Gpu) -> None:
    """Device memory of two processes, through the mapping that the fake NIC makes on CUDA."""
    rng = np.random.default_rng(23)
    for receiver in (gpu.device, "cpu"):
        source = Region(SLOTS, SLOT_BYTES, name="from", device=gpu.peer)
        with peer(
            "show", slots=SLOTS, slot_bytes=SLOT_BYTES, tcp=False, device=receiver, verbs=LIBRARY
        ) as shown:
            link = Link(
                shown.read(),
                backend="verbs",
                slots=(0, SLOTS),
                timeout_us=TIMEOUT_US,
                device=gpu.peer,
                verbs=verbs(),
            )
            stream = gpu.stream()
            for flag in range(1, 10):
                slot, n = flag % SLOTS, int(rng.integers(1, SLOT_BYTES))
                sent = memory_of(source, slot)[0, :n]
                sent[:] = rng.integers(0, 256, n, dtype=np.uint8)
                message = Message(slot, [(0, sent.ctypes.data, n)])
                assert link.enqueue(stream, message, flag) == Status.OK
                shown.write([slot, flag, n])
                assert shown.read() == hashlib.sha256(sent).hexdigest()
            shown.kill()
            end = time.monotonic() + 10
            while link.status == Status.OK:
                assert time.monotonic() < end
            assert link.status == Status.PEER_GONE
    assert ("import" in gpu.log) == (gpu.kind == "cuda")


def memory_that_comes_back(gpu: Gpu) -> None:
    """An allocation that follows another at its address is registered anew."""
    if gpu.kind == "hip":
        return
    way = Way(gpu, "verbs", gpu.peer, gpu.device)
    for seq in range(1, 5):
        way.source = Region(SLOTS, SLOT_BYTES, name="from", device=gpu.peer)
        before = FAKE.fake_dmabufs()
        sent = way.fill(np.random.default_rng(seq), 0)
        assert way.link.post(way.message(0), seq) == Status.OK
        assert way.link.enqueue(way.sends, way.message(1), seq) == Status.OK
        assert way.region.wait_all([0, 1], [seq, seq], TIMEOUT_US) == [0, 0]
        way.check(0, sent, ROWS)
        assert FAKE.fake_dmabufs() == before + 2  # one per NIC


def staged_graphs(gpu: Gpu) -> None:
    """graphs() with a NIC that cannot register device memory."""
    FAKE.fake_refuse_devices(1)
    graphs(gpu, ("verbs",))


def graphs(gpu: Gpu, backends: tuple[str, ...] = ("tcp", "verbs")) -> None:
    """Graphs of several sizes use the same slots and flags; their replays alternate at random."""
    if gpu.kind == "hip":
        return  # the fake HIP driver keeps no graphs
    rng = np.random.default_rng(22)
    for backend in backends:
        way = Way(gpu, backend, gpu.peer, gpu.device)
        flag, recordings = make_flag(1, 2**31 | 1), []
        streams = {}
        for rows in (1, 7, ROWS):
            recordings.append(way.link.record())
            stream = streams[rows] = gpu.stream()
            gpu.driver.fake_set_capturing(ctypes.c_void_p(stream), 1)
            for slot in range(SLOTS):
                assert way.link.enqueue(stream, way.message(slot, rows), flag) == Status.OK
            gpu.driver.fake_set_capturing(ctypes.c_void_p(stream), 0)
        assert not any(way.region.ready(slot, flag) for slot in range(SLOTS))
        counted = gpu.stream()
        gpu.driver.fake_set_capturing(ctypes.c_void_p(counted), 1)
        for slot in range(SLOTS):
            word = way.word[slot : slot + 1].ctypes.data
            assert way.link.enqueue(counted, way.message(slot), flag, word) == Status.OK
        gpu.driver.fake_set_capturing(ctypes.c_void_p(counted), 0)
        for _ in range(25):
            rows = int(rng.choice([1, 7, ROWS, -1]))
            stream = streams.get(rows, counted)
            sent = [way.fill(rng, slot) for slot in range(SLOTS)]
            way.word[:] = rng.integers(0, ROWS + 1, SLOTS)
            way.region.enqueue_wait(way.waits, [*range(SLOTS)], [flag] * SLOTS, reset=True)
            gpu.driver.fake_replay(ctypes.c_void_p(stream))
            gpu.synchronize(way.waits)
            for slot in range(SLOTS):
                way.check(slot, sent[slot], int(way.word[slot]) if rows < 0 else rows)
        for recording in recordings:
            recording.release()
        # A port that is lost inside a replay.
        if backend == "verbs":
            FAKE.fake_lose_acks(b"fake0", 1)
            way.word[:] = ROWS
            way.region.enqueue_wait(way.waits, [0, 1, 2], [flag] * 3, reset=True)
            sent = [way.fill(rng, slot) for slot in range(SLOTS)]
            gpu.driver.fake_replay(ctypes.c_void_p(counted))
            gpu.synchronize(way.waits)
            for slot in range(SLOTS):
                way.check(slot, sent[slot], ROWS)
            FAKE.fake_lose_acks(b"fake0", 0)
        # A peer whose link ended never rings: its guard releases the stream.
        way.region.enqueue_wait(way.waits, [0], [flag], reset=True)
        guard = way.region.guard(way.waits, [0], [flag])
        way.link.close()
        gpu.driver.fake_replay(ctypes.c_void_p(counted))
        began = time.monotonic()
        assert guard.wait(60_000_000) == [Status.PEER_GONE]
        assert time.monotonic() - began < 2


if __name__ == "__main__":
    globals()[sys.argv[1]](Gpu(sys.argv[2]))
