"""Cases of test_comm_gpu_fake.py: ``python gpu_cases.py CASE KIND``; KIND is cuda or hip.

Each case runs in its own process, where libcuda or libamdhip64 is the fake of fake_gpu.cc.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
from comm_peer import peer

from afd_comm import (
    CommError,
    Guard,
    Link,
    Message,
    Region,
    Status,
    StepGate,
    StepPlan,
    VerbsOptions,
    make_flag,
)

TIMEOUT_US = 5_000_000
LIBRARY = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
SLOT_BYTES = 5000


class Gpu:
    """Handle of the fake driver: its devices, streams and call log."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device = f"{kind}:0"
        self.peer = f"{kind}:1"
        self.driver = ctypes.CDLL(LIBRARY[kind])

    def stream(self) -> int:
        out = ctypes.c_void_p()
        name = {"cuda": "cuStreamCreate", "hip": "hipStreamCreateWithFlags"}[self.kind]
        assert getattr(self.driver, name)(ctypes.byref(out), 1) == 0
        assert out.value is not None
        return out.value

    def synchronize(self, stream: int) -> None:
        name = {"cuda": "cuStreamSynchronize", "hip": "hipStreamSynchronize"}[self.kind]
        assert getattr(self.driver, name)(ctypes.c_void_p(stream)) == 0

    @property
    def log(self) -> list[str]:
        return Path(os.environ["FAKE_GPU_LOG"]).read_text().splitlines()


def memory_of(region: Region, slot: int, count: int = 1) -> np.ndarray:
    """Returns payloads as uint8 [count, stride]; the fake's device memory is host memory."""
    view = region.view(slot, count)
    assert view.__dlpack_device__()[0] == {"cuda": 2, "hip": 10}[region.device[:-2]]
    content = ctypes.pythonapi.PyCapsule_GetPointer
    content.restype, content.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = view.__dlpack__()
    # A DLTensor begins with its data pointer.
    address = ctypes.cast(content(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_void_p))[0]
    raw = (ctypes.c_uint8 * (count * region.slot_stride)).from_address(address)
    return np.frombuffer(raw, np.uint8).reshape(count, region.slot_stride)


USER = b"user words"


def enqueue(link: Link, stream: int, slot: int, flag: int, *arrays: np.ndarray) -> Status:
    parts, offset = [], 0
    for array in arrays:
        parts.append((offset, array.ctypes.data, array.nbytes))
        offset += array.nbytes
    return link.enqueue(stream, Message(slot, parts, USER, 3), flag)


def device_to_device(gpu: Gpu) -> None:
    rng = np.random.default_rng(3)
    region = Region(3, SLOT_BYTES, name="ffn", device=gpu.device)
    assert region.device == gpu.device and region.addresses[0].startswith("ipc:")
    link = Link(region.addresses, slots=(0, 3), timeout_us=TIMEOUT_US, device=gpu.peer)
    assert link.backend == "ipc"
    there, here = gpu.stream(), gpu.stream()
    for seq in range(1, 60):
        slot, flag = int(rng.integers(3)), make_flag(1, seq)
        data = rng.integers(0, 256, int(rng.integers(1, SLOT_BYTES)), dtype=np.uint8)
        region.enqueue_wait(here, [slot], [flag])
        assert enqueue(link, there, slot, flag, data[: data.size // 2], data[data.size // 2 :]) == 0
        gpu.synchronize(here)
        assert np.array_equal(memory_of(region, slot)[0, : data.size], data)
    # The link stays within this process: no memory import, but peer access between the GPUs.
    assert "import" not in gpu.log and "reach" in gpu.log
    # A copy between GPUs must not fall back to compute units on AMD.
    copies = [line for line in gpu.log if line.startswith("copy")]
    assert all(line.endswith({"cuda": "kind 0", "hip": "kind 1024"}[gpu.kind]) for line in copies)


def between_processes(gpu: Gpu) -> None:
    region = Region(2, SLOT_BYTES, name="ffn", device=gpu.device)
    stream, flag = gpu.stream(), make_flag(1, 1)
    region.enqueue_wait(stream, [0, 1], [flag, flag])
    guard = region.guard(stream, [0, 1], [flag, flag])
    with peer(
        "send",
        addresses=region.addresses,
        backend="auto",
        slots=(0, 2),
        flag=flag,
        value=9,
        device=gpu.peer,
    ) as sender:
        assert sender.read() == "posted"
        assert guard.wait(TIMEOUT_US) == [Status.OK, Status.OK]
        assert (memory_of(region, 0, 2)[:, :8] == 9).all()
        assert "import" in gpu.log
        assert region.header(0).count == 16  # sent with post(), so the host wrote the header
        # After the sender is killed, waits on its slots end at once, long before the deadline.
        second = make_flag(1, 2)
        region.enqueue_wait(stream, [0, 1], [second, second])
        guard = region.guard(stream, [0, 1], [second, second])
        sender.kill()
        start = time.monotonic()
        assert guard.wait(60_000_000) == [Status.PEER_GONE, Status.PEER_GONE]
        assert time.monotonic() - start < 2
    assert not region.ready(0, second)


def shared_payload(gpu: Gpu) -> None:
    """All peers of a micro-batch write into one payload: 2 peers, 2 micro-batches."""
    region = Region(4, SLOT_BYTES, name="ffn", device=gpu.device, payloads=2)
    stream = gpu.stream()
    links = [
        Link(region.addresses, slots=(2 * p, 2), timeout_us=TIMEOUT_US, device=gpu.peer)
        for p in range(2)
    ]
    for p, link in enumerate(links):
        for mb in range(2):
            value = np.full(16, 10 * p + mb, np.uint8)
            parts = [(16 * p, value.ctypes.data, 16)]
            assert link.enqueue(stream, Message(2 * p + mb, parts), 5) == Status.OK
            gpu.synchronize(stream)
    batch = memory_of(region, 0, 2)
    assert batch[:, [0, 15, 16, 31]].tolist() == [[0, 0, 10, 10], [1, 1, 11, 11]]
    try:
        region.view(1, 2)
    except IndexError as error:
        assert "has 2 payloads" in str(error)
    else:
        raise AssertionError("a view beyond the payloads was accepted")


def gpu_to_cpu(gpu: Gpu) -> None:
    region = Region(2, SLOT_BYTES, name="ffn", tcp_host="127.0.0.1")  # a region in host memory
    link = Link(region.addresses, slots=(0, 2), timeout_us=TIMEOUT_US, device=gpu.device)
    assert link.backend == "ipc"
    stream, data = gpu.stream(), np.arange(100, dtype=np.uint8)
    for seq in range(1, 30):
        flag = make_flag(1, seq)
        # The waiter is asleep by then. No GPU can wake it, but it must still see the doorbell.
        timer = threading.Timer(0.002, enqueue, (link, stream, 1, flag, data))
        timer.start()
        assert region.wait_all([1], [flag], TIMEOUT_US) == [Status.OK]
        timer.join()
        assert np.array_equal(region.buffer(1)[:100], data)
        h = region.header(1)
        assert (h.user.rstrip(b"\0"), h.count) == (USER, 3)
        assert (h.nbytes, h.t_posted) == (100, 0)
    assert "pin flags 3" in gpu.log


def cpu_to_gpu(gpu: Gpu) -> None:
    region = Region(2, SLOT_BYTES, name="attention")
    region.pin(gpu.device)
    link = Link(region.addresses, slots=(0, 2), timeout_us=TIMEOUT_US)
    assert link.backend == "shm"
    stream, data = gpu.stream(), np.arange(100, dtype=np.uint8)
    region.enqueue_wait(stream, [1], [5])
    guard = region.guard(stream, [1], [5])
    part = (0, data.ctypes.data, data.nbytes)
    assert link.post(Message(1, [part]), 5) == Status.OK
    assert guard.wait(TIMEOUT_US) == [Status.OK] and guard.done
    assert np.array_equal(region.buffer(1)[:100], data)


def post_blocks_until_copied(gpu: Gpu) -> None:
    region = Region(2, SLOT_BYTES, name="ffn", device=gpu.device)
    link = Link(region.addresses, slots=(0, 2), timeout_us=TIMEOUT_US, device=gpu.peer)
    data = np.arange(200, dtype=np.uint8)
    part = (8, data.ctypes.data, data.nbytes)
    assert link.post(Message(1, [part], USER, 3), 3) == Status.OK
    data[:] = 0
    assert region.wait_all([1], [3], 0) == [Status.OK]
    assert memory_of(region, 1)[0, 8:208].tolist() == list(range(200))
    assert region.header(1).count == 3
    assert link.post(Message(1, [], USER, 3), 4) == Status.OK  # header only: no copy, no stream
    assert region.ready(1, 4)


def wedged_peer(gpu: Gpu) -> None:
    """A stream with several waits on doorbells that never ring is released at its deadline."""
    region = Region(3, SLOT_BYTES, name="ffn", device=gpu.device)
    link = Link(region.addresses, slots=(0, 3), timeout_us=TIMEOUT_US, device=gpu.peer)
    stream, there, flags = gpu.stream(), gpu.stream(), [make_flag(1, seq) for seq in range(1, 13)]
    slots = [seq % 3 for seq in range(12)]

    def step() -> Guard:
        for slot, flag in zip(slots, flags, strict=True):
            region.enqueue_wait(stream, [slot], [flag])
        return region.guard(stream, slots, flags)

    guard = step()
    for slot, flag in zip(slots, flags, strict=True):
        assert enqueue(link, there, slot, flag) == Status.OK
        while not region.ready(slot, flag):  # the messages of one slot must stay in order
            time.sleep(0.0001)
        time.sleep(0.02)  # the stream must see this doorbell before the next one overwrites it
    assert guard.wait(TIMEOUT_US) == [Status.OK] * 12
    # The same flags again, as in a replay: the doorbells still hold the last step's flags.
    guard = step()
    assert enqueue(link, there, 0, flags[0]) == Status.OK
    start = time.monotonic()
    assert not guard.done
    assert guard.wait(100_000) == [Status.DEADLINE] * 12
    assert 0.1 <= time.monotonic() - start < 1.0
    assert guard.done
    # The values that the guard wrote do not satisfy the next step's waits.
    assert not any(region.ready(slot, flag) for slot in range(3) for flag in flags)


def replay_with_reset(gpu: Gpu) -> None:
    """With reset=True, one constant flag works for every replay."""
    region = Region(1, SLOT_BYTES, name="ffn", device=gpu.device)
    link = Link(region.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
    here, there = gpu.stream(), gpu.stream()
    for value in range(50):
        region.enqueue_wait(here, [0], [5], reset=True)
        data = np.full(64, value, np.uint8)
        assert enqueue(link, there, 0, 5, data) == Status.OK
        gpu.synchronize(here)
        assert (memory_of(region, 0)[0, :64] == value).all() and not region.ready(0, 5)


def many_waits_in_one_call(gpu: Gpu) -> None:
    count = 300
    region = Region(count, 64, name="many", device=gpu.device)
    link = Link(region.addresses, slots=(0, count), timeout_us=TIMEOUT_US, device=gpu.peer)
    here, there = gpu.stream(), gpu.stream()
    region.enqueue_wait(here, list(range(count)), [9] * count, reset=True)
    for slot in range(count):
        assert enqueue(link, there, slot, 9) == Status.OK
    gpu.synchronize(here)
    assert not any(region.ready(slot, 9) for slot in range(count))


def capture(gpu: Gpu) -> None:
    """ROCclr does not capture stream memory operations, so the node must be added explicitly."""
    if gpu.kind == "cuda":
        return
    region = Region(2, SLOT_BYTES, name="ffn", device=gpu.device)
    stream = gpu.stream()
    gpu.driver.fake_set_capturing(ctypes.c_void_p(stream), 1)
    region.enqueue_wait(stream, [0, 1], [4, 4], reset=True)
    assert gpu.log[-2:] == ["capture node of 4 ops", "capture dependencies 1 flags 1"]
    assert not any(line.startswith("op ") for line in gpu.log)


def gate(gpu: Gpu) -> None:
    """Steps of 3 positions with 2 peers, one of which is in every second step only."""
    region = Region(2, SLOT_BYTES, name="ffn", device=gpu.device)
    stream, answers = gpu.stream(), np.zeros((2, 16), np.uint8)
    part = (0, answers.ctypes.data, answers[0].nbytes)
    positions = [(0, Message(0, [part])) for _ in range(3)]
    plan, gated = StepPlan(positions, lanes=1, stride=1), StepGate(region, peers=2, lanes=1)
    back = [Region(1, SLOT_BYTES, name=f"attention-{i}", device=gpu.peer) for i in range(2)]
    there = [
        Link(region.addresses, slots=(i, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
        for i in range(2)
    ]
    for i, peer_region in enumerate(back):
        link = Link(peer_region.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.device)
        assert link.backend == "ipc"
        gated.set_peer(i, link, first_slot=i, first_flag=make_flag(1 + i, 1))
    for step in range(6):
        present = [0, 1] if step % 2 else [0]
        depths = np.array([1, step % 2], np.int32)
        gated.begin(plan, depths, np.ones((2, 1), np.int32), TIMEOUT_US)
        for number in (1, 2, 3):
            gated.enqueue_wait(stream, 0, number)
            gated.enqueue_ticket(stream, 0, number)
        for number in range(3):
            answers[:] = 10 * step + number  # before the requests: the stream has no kernel here
            flags = [make_flag(1 + i, 1 + number) for i in present]
            request = np.full(8, step, np.uint8)
            for i, flag in zip(present, flags, strict=True):
                message = Message(i, [(0, request.ctypes.data, request.nbytes)])
                assert there[i].post(message, flag) == Status.OK
            for i, flag in zip(present, flags, strict=True):
                assert back[i].wait_all([0], [flag], TIMEOUT_US) == [Status.OK]
                assert (memory_of(back[i], 0)[0, :16] == 10 * step + number).all()
        assert gated.wait(stream) == {}
    assert (memory_of(back[1], 0)[0, :16] == 52).all()


def bad_input(gpu: Gpu) -> None:
    def refused(text: str, call: object, *args: object, **kwargs: object) -> None:
        try:
            call(*args, **kwargs)  # type: ignore[operator]
        except (CommError, IndexError, ValueError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no error with {text!r} was raised")

    region = Region(2, SLOT_BYTES, name="ffn", device=gpu.device)
    other = {"cuda": "hip:0", "hip": "cuda:0"}[gpu.kind]
    refused("is not a device", Region, 1, 1, name="x", device="gpu0")
    refused("process sees 2 GPUs", Region, 1, 1, name="x", device=f"{gpu.kind}:7")
    refused("out of memory", Region, 1, 2**35, name="x", device=gpu.device)
    refused("must divide", Region, 4, 1, name="x", payloads=3)
    refused("use view()", region.buffer, 0)
    refused("offers: ipc", Link, region.addresses, timeout_us=1000, backend="shm")
    refused("are on " + gpu.device, Link, region.addresses, timeout_us=1000)
    refused("cannot load", Link, region.addresses, timeout_us=1000, device=other)
    refused("already belongs", region.pin, gpu.device)
    refused("plain host memory", Region(1, 1, name="x").enqueue_wait, 0, [0], [1])
    plain = Region(1, 1, name="x")
    shm = Link(plain.addresses, timeout_us=1000)
    refused("has no streams", shm.enqueue, 0, Message(0, []), 1)
    link = Link(region.addresses, slots=(0, 1), timeout_us=TIMEOUT_US, device=gpu.peer)
    data, stream = np.zeros(SLOT_BYTES + 1, np.uint8), gpu.stream()
    assert enqueue(link, stream, 0, 1, data) == Status.CAPACITY
    assert enqueue(link, stream, 1, 1, data[:1]) == Status.BAD_HEADER
    assert enqueue(link, stream, 0, 0, data[:1]) == Status.BAD_HEADER
    link.close()
    assert enqueue(link, stream, 0, 1, data[:1]) == Status.CLOSED
    region.close()
    fresh = Region(1, 1, name="y", device=gpu.device)
    addresses = fresh.addresses
    late = Link(addresses, timeout_us=1000, device=gpu.peer)
    fresh.close()
    assert enqueue(late, stream, 0, 1, data[:1]) == Status.PEER_GONE


def over_rdma(gpu: Gpu) -> None:
    """Slots and sources in GPU memory, over the fake libibverbs that FAKE_IBVERBS names."""
    fake = ctypes.CDLL(os.environ["FAKE_IBVERBS"])
    verbs = VerbsOptions(
        ports=["fake0", "fake1"], host="127.0.0.1", library=os.environ["FAKE_IBVERBS"]
    )
    nbytes = 200_000
    source = Region(2, nbytes, name="source", device=gpu.peer)  # source memory on the other GPU
    region = Region(4, nbytes, name="ffn", device=gpu.device, payloads=2, verbs=verbs)
    link = Link(
        region.addresses,
        backend="verbs",
        slots=(0, 4),
        timeout_us=TIMEOUT_US,
        device=gpu.peer,
        verbs=verbs,
    )
    here = memory_of(source, 0)[0]
    parts = [(0, here.ctypes.data, nbytes)]
    # The slots, a sample that the link tries, and the source once it is used: one dma-buf per NIC
    # each. The fake HIP driver cannot export dma-bufs: there, as with nvidia-peermem, the address
    # itself is registered.
    assert fake.fake_dmabufs() == {"cuda": 4, "hip": 0}[gpu.kind]
    assert link.post(Message(1, parts), 1) == Status.OK
    assert fake.fake_dmabufs() == {"cuda": 6, "hip": 0}[gpu.kind]
    assert link.notes == ""
    for slot in range(4):
        here[:] = np.random.default_rng(slot).integers(0, 256, here.size, dtype=np.uint8)
        assert link.post(Message(slot, parts), 7 + slot) == Status.OK
        assert region.wait_all([slot], [7 + slot], TIMEOUT_US) == [Status.OK]
        assert np.array_equal(memory_of(region, slot)[0, :nbytes], here[:nbytes])
        assert link.wait_sent(slot, TIMEOUT_US) == Status.OK


if __name__ == "__main__":
    globals()[sys.argv[1]](Gpu(sys.argv[2]))
