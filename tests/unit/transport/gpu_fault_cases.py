"""Cases of test_comm_gpu_fake.py with several peers, or with a peer that dies, stops or is late.

They run like those of gpu_cases.py: ``python gpu_fault_cases.py CASE KIND``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
from comm_peer import peer
from gpu_cases import SLOT_BYTES, TIMEOUT_US, Gpu, enqueue, memory_of

from afd_comm import CommError, Hold, Link, Message, Region, Status, make_flag


def stopped_sender(gpu: Gpu) -> None:
    """A stopped sender is late, not gone: the wait ends at its deadline."""
    region = Region(1, SLOT_BYTES, name="ffn", device=gpu.device)
    stream, flag = gpu.stream(), make_flag(1, 1)
    arguments = {"addresses": region.addresses, "backend": "auto", "slots": (0, 1), "value": 9}
    with peer("send", flag=flag, device=gpu.peer, **arguments) as sender:
        assert sender.read() == "posted"
        os.kill(sender.process.pid, signal.SIGSTOP)
        second = make_flag(1, 2)
        region.enqueue_wait(stream, [0], [second])
        start = time.monotonic()
        assert region.guard(stream, [0], [second]).wait(150_000) == [Status.DEADLINE]
        assert time.monotonic() - start < 1 and not region.gone(0)


def stopped_and_killed_owner(gpu: Gpu) -> None:
    """Posts need only the owner's memory: they work while it is stopped, fail once it is dead."""
    with peer("own", slots=1, slot_bytes=SLOT_BYTES, tcp=False, device=gpu.device) as owner:
        link = Link(owner.read(), slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
        stream, data = gpu.stream(), np.arange(100, dtype=np.uint8)
        part = (0, data.ctypes.data, data.nbytes)
        os.kill(owner.process.pid, signal.SIGSTOP)
        for seq in range(1, 20):
            assert enqueue(link, stream, 0, seq, data) == Status.OK
            assert link.post(Message(0, [part]), 100 + seq) == Status.OK
        owner.kill()
        end = time.monotonic() + 1
        while (status := enqueue(link, stream, 0, 99, data)) == Status.OK:
            assert time.monotonic() < end
        assert status == link.post(Message(0, [part]), 200) == Status.PEER_GONE
        # Pending copies read `data`, which is freed at the end of this function.
        gpu.synchronize(stream)


def late_message_of_a_dead_epoch(gpu: Gpu) -> None:
    """The message was enqueued before its writer lost the slot, and runs after that."""
    gate = Region(1, 64, name="gate", device=gpu.device)
    region = Region(1, SLOT_BYTES, name="ffn", device=gpu.device)
    streams, here = [gpu.stream(), gpu.stream()], gpu.stream()
    old, new = (np.full(64, value, np.uint8) for value in (1, 2))
    first = Link(region.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
    gate.enqueue_wait(streams[0], [0], [1])
    assert enqueue(first, streams[0], 0, make_flag(1, 7), old) == Status.OK
    second = Link(region.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
    assert enqueue(first, streams[0], 0, make_flag(1, 8), old) == Status.CLOSED
    opener = Link(gate.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
    assert enqueue(opener, streams[1], 0, 1) == Status.OK
    gpu.synchronize(streams[0])
    flag = make_flag(2, 7)
    region.enqueue_wait(here, [0], [flag])
    guard = region.guard(here, [0], [flag])
    assert not guard.done and not region.ready(0, flag)
    assert enqueue(second, streams[1], 0, flag, new) == Status.OK
    assert guard.wait(TIMEOUT_US) == [Status.OK]
    assert (memory_of(region, 0)[0, :64] == 2).all()


def withheld_steps(gpu: Gpu) -> None:
    """A writer ends at a random moment of a step. Work behind the step runs at once if the writer
    had rung all its doorbells, else once the hold is opened."""
    rng = np.random.default_rng(7)
    hold, here, there = Hold(gpu.device), gpu.stream(), gpu.stream()
    behind = Region(1, 64, name="behind", device=gpu.device)
    mark = Link(behind.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.device)
    region = Region(1, SLOT_BYTES, name="attention", device=gpu.device)
    counts = {Status.OK: 0, Status.PEER_GONE: 0}
    for step in range(1, 61):
        writer = Link(region.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
        flags = [make_flag(step, seq) for seq in (1, 2, 3)]
        for flag in flags:
            region.enqueue_wait(here, [0], [flag])
        guard = region.guard(here, [0] * 3, flags, hold)
        assert enqueue(mark, here, 0, step) == Status.OK
        rung = int(rng.integers(4))
        ender = threading.Thread(target=_ring_and_end, args=(region, writer, there, flags[:rung]))
        ender.start()
        statuses = guard.wait(60_000_000)
        ender.join()
        assert statuses == [statuses[0]] * 3
        assert rung == 3 or statuses[0] == Status.PEER_GONE
        counts[statuses[0]] += 1
        if statuses[0] == Status.PEER_GONE:
            time.sleep(0.002)
            assert hold.closed and not behind.ready(0, step)
            hold.open()
        assert behind.wait_all([0], [step], TIMEOUT_US) == [Status.OK]
        assert not hold.closed
    assert min(counts.values()) > 5, counts


def _ring_and_end(region: Region, writer: Link, stream: int, flags: list[int]) -> None:
    for flag in flags:
        assert enqueue(writer, stream, 0, flag) == Status.OK
        while not region.ready(0, flag):
            time.sleep(0.0001)
        time.sleep(0.001)  # the stream must see this doorbell before the next one overwrites it
    writer.close()


def refused_page_locking(gpu: Gpu) -> None:
    """Page locking fails at either end, as under RLIMIT_MEMLOCK."""
    ours, plain = (
        Region(1, 64, name="ffn", device=gpu.device),
        Region(1, 64, name="attention"),
    )
    os.environ["FAKE_GPU_REFUSE_PIN"] = "1"
    for refused in (
        lambda: Region(1, 64, name="late", device=gpu.device),
        lambda: plain.pin(gpu.device),
        lambda: Link(ours.addresses, timeout_us=TIMEOUT_US, device=gpu.peer),
    ):
        try:
            refused()
        except CommError as error:
            assert "raise the limit of locked memory (ulimit -l)" in str(error), error
        else:
            raise AssertionError("the refused page locking raised no error")
    del os.environ["FAKE_GPU_REFUSE_PIN"]
    link = Link(ours.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
    assert link.post(Message(0, []), 1) == Status.OK


def rows_of(who: int, slot: int, seq: int) -> np.ndarray:
    rng = np.random.default_rng((who, slot, seq))
    return rng.integers(0, 256, int(rng.integers(1, SLOT_BYTES)), dtype=np.uint8)


def three_peers(gpu: Gpu) -> None:
    """Three processes write into one region at once; then one of them is killed."""
    peers, each = 3, 2
    region = Region(peers * each, SLOT_BYTES, name="ffn", device=gpu.device)
    slots, stream = list(range(peers * each)), gpu.stream()
    command = [sys.executable, __file__, "one_of_three", gpu.kind]
    running = [
        subprocess.Popen(
            [*command, json.dumps([who, each, region.addresses])], stdin=subprocess.PIPE, text=True
        )
        for who in range(peers)
    ]

    def step(seq: int) -> list[Status]:
        flags = [make_flag(1, seq)] * len(slots)
        region.enqueue_wait(stream, slots, flags)
        guard = region.guard(stream, slots, flags)
        for process in running:
            assert process.stdin is not None
            process.stdin.write(f"{seq}\n")
            process.stdin.flush()
        return guard.wait(TIMEOUT_US)

    try:
        for seq in range(1, 21):
            assert step(seq) == [Status.OK] * len(slots)
            for slot in slots:
                rows = rows_of(slot // each, slot, seq)
                assert np.array_equal(memory_of(region, slot)[0, : rows.size], rows)
        running[1].kill()
        running.pop(1).communicate()
        start = time.monotonic()
        assert step(21) == [Status.OK] * 2 + [Status.PEER_GONE] * 2 + [Status.OK] * 2
        assert time.monotonic() - start < 2
    finally:
        for process in running:
            process.kill()
            process.communicate()


def one_of_three(gpu: Gpu) -> None:
    """A peer of three_peers. For each sequence number on stdin it sends one message per slot."""
    who, each, addresses = json.loads(sys.argv[3])
    first = who * each
    link = Link(addresses, slots=(first, each), timeout_us=TIMEOUT_US, device=gpu.peer)
    stream = gpu.stream()
    for line in sys.stdin:
        seq = int(line)
        rows = [rows_of(who, slot, seq) for slot in range(first, first + each)]
        for slot, data in zip(range(first, first + each), rows, strict=True):
            assert enqueue(link, stream, slot, make_flag(1, seq), data) == Status.OK
        gpu.synchronize(stream)


if __name__ == "__main__":
    globals()[sys.argv[1]](Gpu(sys.argv[2]))
